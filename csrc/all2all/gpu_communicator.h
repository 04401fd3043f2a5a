#pragma once

#include <memory>
#include <vector>

#include "all2all/exchange.h"
#include "all2all/ipc_board.h"
#include "all2all/workspace.h"
#include "common/stream.h"

// One rank's end of the protocol on a GPU. Its peers are of this process, which has the pointers to all memory, or of
// processes that map each other's (ipc_workspaces.h). No call waits on the host, except to have more memory with other
// processes: what went wrong is told by the next one.
namespace ltx {

struct GpuEnd;
struct HostWords;

// Memory as one device sees it: allocated here, not by torch, and freed with its last owner; or opened, and then
// closed.
class GpuMemory {
 public:
  GpuMemory(int device, int64_t bytes);
  GpuMemory(int device, const IpcHandle& handle);  // of another process's
  GpuMemory(const GpuMemory&) = delete;
  GpuMemory& operator=(const GpuMemory&) = delete;
  ~GpuMemory();

  std::byte* data() const { return data_; }
  IpcHandle handle() const;

 private:
  int device_;
  bool opened_ = false;
  std::byte* data_ = nullptr;
};

// The workspaces of all ranks: the Control of each, and its two slots, which move when they grow. What they leave stays
// until the end: views of results and captured graphs point into it.
class GpuWorkspaces {
 public:
  GpuWorkspaces(std::vector<int> devices, int64_t result_bytes);  // of ranks that are all of this process
  GpuWorkspaces(const GpuWorkspaces&) = delete;
  GpuWorkspaces& operator=(const GpuWorkspaces&) = delete;
  virtual ~GpuWorkspaces() = default;

  int world_size() const { return static_cast<int>(devices_.size()); }
  int device(int rank) const { return devices_[rank]; }
  Control* control(int rank) const;
  std::byte* slot(int rank, int slot_idx) const;
  const std::shared_ptr<GpuMemory>& slots(int rank) const { return slots_[rank]; }

  int64_t capacity_bytes() const { return slot_bytes_; }

  // Before the launches of a call, which `hash` is of: has slots of so many bytes. Throws IpcAbsence if peers that
  // must grow too are absent.
  virtual void begin_call(uint64_t hash, int64_t slot_bytes, double timeout_seconds);

 protected:
  GpuWorkspaces(std::vector<int> devices, std::shared_ptr<const void> last);

  // Zeros, and kernels that need not be loaded any more: before a peer's first call.
  void clear_control(int rank) const;
  void replace_slots(std::vector<std::shared_ptr<GpuMemory>> slots, int64_t slot_bytes);

  std::shared_ptr<const void> last_;  // goes after all memory
  std::vector<int> devices_;          // through which this process sees the memory of each rank
  int64_t slot_bytes_ = 0;
  std::vector<std::shared_ptr<GpuMemory>> controls_;
  std::vector<std::shared_ptr<GpuMemory>> slots_;
  std::vector<std::shared_ptr<GpuMemory>> outgrown_;
};

class GpuCommunicator {
 public:
  // num_sms: multiprocessors that a push may use.
  GpuCommunicator(std::shared_ptr<GpuWorkspaces> workspaces, int rank, int num_sms, int64_t result_bytes);
  GpuCommunicator(const GpuCommunicator&) = delete;
  GpuCommunicator& operator=(const GpuCommunicator&) = delete;
  ~GpuCommunicator();

  Device device() const { return {Device::Kind::kCuda, workspaces_->device(rank_)}; }

  // 0: waits for ever.
  void set_timeout(double seconds) { timeout_seconds_ = seconds; }

  // Throws ExchangeError if an exchange has failed by now, and ever after; synchronize() waits for those that run.
  void check() const;
  void synchronize() const;
  Status status() const;
  // Waits for all exchanges that run, 10 s for those without a timeout.
  void part() const;

 private:
  friend struct GpuRun;

  std::shared_ptr<GpuWorkspaces> workspaces_;
  int rank_;
  int num_sms_;
  int64_t result_bytes_;
  int slot_ = 0;  // of the next call
  double timeout_seconds_ = 10;
  HostWords* host_ = nullptr;
};

// What a result lies in, and for views what keeps it.
struct GpuResult {
  std::byte* data;
  std::shared_ptr<const void> memory;
};

// One rank's part of a call.
struct GpuRun {
  GpuCommunicator& communicator;
  ExchangeCall call;
  std::vector<TensorView> tensors;
  std::vector<std::byte*> outs;  // contiguous tensors of the results' sizes, or none: views
  Stream stream;

  GpuEnd end(int slot) const;
  int64_t bytes_needed() const;
  void check() const;
  void begin_call() const;
  void push(int slot) const;
  std::vector<GpuResult> results(int slot) const;

  // A call of these ranks: all begins, then all pushes, then all waits, so that no launch waits for a later one, and
  // ranks may share a stream. Ranks of one device have one stream. Peers that are not among them may call elsewhere.
  static std::vector<std::vector<GpuResult>> all(const std::vector<GpuRun>& runs);
};

}  // namespace ltx
