#include "ops/rms_norm_split_rope/rms_norm_split_rope.h"

#include "ops/norm_rope_cuda.h"

namespace ltx {

namespace {

NormRopeTask task_of(const NormRopeParams& params) {
  const TensorView& cos = params.cos_freqs;
  const TensorView& sin = params.sin_freqs;
  Rows<3> rows;
  rows.append(params.x.size(0),
              {params.x.stride(0), cos.size(0) == 1 ? 0 : cos.stride(0), sin.size(0) == 1 ? 0 : sin.stride(0)});
  rows.append(params.x.size(1), {params.x.stride(1), cos.stride(2), sin.stride(2)});
  return make_task(params, rows, cos.size(3), 0);
}

bool reads_vectors(const NormRopeParams& params) {
  return params.cos_freqs.size(3) % kVector == 0 && reads_vectors(params, kVector);
}

void launch(const char* op, const NormRopeArgs& args, Stream stream) {
  if (max_rows(args) == 0) return;
  if (!args.vectors || !launch_vectors<SplitLayout>(op, args, stream)) launch_scalar(op, args, stream);
}

}  // namespace

void rms_norm_split_rope_cuda(const NormRopeParams& params, Stream stream) {
  rms_norm_split_rope_check(params);
  const NormRopeArgs args{.tasks = {task_of(params), {}},
                          .num_tasks = 1,
                          .vectors = reads_vectors(params),
                          .hidden = params.x.size(2),
                          .eps = static_cast<float>(params.eps),
                          .device = params.x.device.index};
  launch("rms_norm_split_rope", args, stream);
}

void rms_norm_split_rope_qk_cuda(const NormRopeQkParams& params, Stream stream) {
  rms_norm_split_rope_qk_check(params);
  const NormRopeArgs args{.tasks = {task_of(params.q), task_of(params.k)},
                          .num_tasks = 2,
                          .vectors = reads_vectors(params.q) && reads_vectors(params.k),
                          .hidden = params.q.x.size(2),
                          .eps = static_cast<float>(params.q.eps),
                          .device = params.q.x.device.index};
  launch("rms_norm_split_rope_qk", args, stream);
}

}  // namespace ltx
