#include <map>
#include <utility>

#include "all2all/registry.h"
#include "common/check.h"

namespace ltx {
namespace {

struct Registry {
  std::mutex mutex;
  int64_t last = 0;
  std::map<int64_t, std::shared_ptr<Communicator>> communicators;
};

Registry& registry() {
  static auto* instance = new Registry;  // outlives every thread: never freed
  return *instance;
}

}  // namespace

int64_t add_communicator(std::shared_ptr<Communicator> communicator) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  all.communicators.emplace(++all.last, std::move(communicator));
  return all.last;
}

std::shared_ptr<Communicator> find_communicator(const char* op, int64_t id) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  const auto found = all.communicators.find(id);
  LTX_CHECK(found != all.communicators.end(), std::string(op) + ": this communicator was destroyed");
  const pid_t process = found->second->process;
  LTX_CHECK(process == getpid(), std::string(op) + ": this communicator must be used by the process that made it, " +
                                     std::to_string(process) + ", got its fork " + std::to_string(getpid()));
  return found->second;
}

void remove_communicator(int64_t id) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  all.communicators.erase(id);
}

}  // namespace ltx
