#include "ops/rms_norm_rope/rms_norm_rope.h"

#include "ops/norm_rope_cuda.h"

namespace ltx {

namespace {

int table_step_of(const NormRopeParams& params) { return params.cos_freqs.size(-1) == params.x.size(-1) ? 2 : 1; }

NormRopeTask task_of(const NormRopeParams& params) {
  const Rows<3> rows = make_rows<3>(params.x, {&params.x, &params.cos_freqs, &params.sin_freqs});
  return make_task(params, rows, params.x.size(-1) / 2, table_step_of(params));
}

bool reads_vectors(const NormRopeParams& params) { return reads_vectors(params, kVector / 2 * table_step_of(params)); }

void launch(const char* op, const NormRopeArgs& args, Stream stream) {
  if (max_rows(args) == 0) return;
  const bool launched =
      args.vectors && (args.tasks[0].table_step == 2 ? launch_vectors<InterleavedLayout<2>>(op, args, stream)
                                                     : launch_vectors<InterleavedLayout<1>>(op, args, stream));
  if (!launched) launch_scalar(op, args, stream);
}

}  // namespace

void rms_norm_rope_cuda(const NormRopeParams& params, Stream stream) {
  rms_norm_rope_check(params);
  const NormRopeArgs args{.tasks = {task_of(params), {}},
                          .num_tasks = 1,
                          .vectors = reads_vectors(params),
                          .hidden = params.x.size(-1),
                          .eps = static_cast<float>(params.eps),
                          .device = params.x.device.index};
  launch("rms_norm_rope", args, stream);
}

void rms_norm_rope_qk_cuda(const NormRopeQkParams& params, Stream stream) {
  rms_norm_rope_qk_check(params);
  const NormRopeArgs args{.tasks = {task_of(params.q), task_of(params.k)},
                          .num_tasks = 2,
                          .vectors = reads_vectors(params.q) && reads_vectors(params.k) &&
                                     table_step_of(params.q) == table_step_of(params.k),
                          .hidden = params.q.x.size(-1),
                          .eps = static_cast<float>(params.q.eps),
                          .device = params.q.x.device.index};
  launch("rms_norm_rope_qk", args, stream);
}

}  // namespace ltx
