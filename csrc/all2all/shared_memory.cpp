#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <random>
#include <system_error>
#include <utility>

#include "all2all/shared_memory.h"
#include "common/check.h"

namespace ltx {
namespace {

constexpr const char* kFolder = "/dev/shm/";

std::string error_text() { return std::generic_category().message(errno); }

std::string prefix() { return "ltx-kernels-" + std::to_string(getuid()) + "-"; }

std::string random_name() {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::random_device random;
  std::string name = prefix();
  for (int i = 0; i < 16; ++i) name += kDigits[random() % 16];
  return name;
}

// Whether the file still has its name. One that was opened a moment ago may have been removed since.
bool is_linked(int file) {
  struct stat status{};
  return fstat(file, &status) == 0 && status.st_nlink > 0;
}

// Of one byte, as a lock of the open file and not of the process: two ranks of one process have one each.
struct flock byte_lock(short type, int64_t byte) {
  struct flock lock{};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = byte;
  lock.l_len = 1;
  return lock;
}

}  // namespace

std::shared_ptr<SharedMemory> SharedMemory::of_this_process(int64_t bytes) {
  auto memory = std::shared_ptr<SharedMemory>(new SharedMemory(-1, bytes, ""));
  memory->map();
  return memory;
}

std::shared_ptr<SharedMemory> SharedMemory::create(int64_t bytes) {
  remove_abandoned_memory();
  for (;;) {
    const std::string name = random_name();
    const int file = ::open((kFolder + name).c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (file < 0 && errno == EEXIST) continue;
    LTX_CHECK(file >= 0, "All2All: cannot create a file in /dev/shm: " + error_text());
    // Between the two calls another group may take it for abandoned: then it has the lock, or the name is gone.
    if (flock(file, LOCK_EX | LOCK_NB) != 0 || !is_linked(file)) {
      close(file);
      continue;
    }
    auto memory = std::shared_ptr<SharedMemory>(new SharedMemory(file, bytes, name));
    memory->linked_ = true;
    LTX_CHECK(ftruncate(file, bytes) == 0,
              "All2All: cannot make a file of " + std::to_string(bytes) + " bytes in /dev/shm: " + error_text());
    memory->map();
    return memory;
  }
}

std::shared_ptr<SharedMemory> SharedMemory::open(const std::string& name, int64_t bytes) {
  LTX_CHECK(name.starts_with(prefix()) && name.find('/') == std::string::npos,
            "All2All: shared memory must be named " + prefix() + "..., got " + name);
  const int file = ::open((kFolder + name).c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW);
  LTX_CHECK(file >= 0, "All2All: cannot open /dev/shm/" + name + ": " + error_text());
  auto memory = std::shared_ptr<SharedMemory>(new SharedMemory(file, bytes, name));
  memory->linked_ = true;
  memory->map();
  return memory;
}

SharedMemory::SharedMemory(int file, int64_t bytes, std::string name)
    : file_(file), bytes_(bytes), name_(std::move(name)) {}

void SharedMemory::map() {
  const int flags = file_ < 0 ? MAP_SHARED | MAP_ANONYMOUS : MAP_SHARED;
  void* mapped = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, flags | MAP_NORESERVE, file_, 0);
  LTX_CHECK(mapped != MAP_FAILED, "All2All: cannot map " + std::to_string(bytes_) + " bytes: " + error_text());
  data_ = static_cast<std::byte*>(mapped);
}

SharedMemory::~SharedMemory() {
  if (linked_) ::unlink((kFolder + name_).c_str());
  if (data_ != nullptr) munmap(data_, bytes_);
  if (file_ >= 0) close(file_);
}

void SharedMemory::unlink() {
  if (std::exchange(linked_, false)) ::unlink((kFolder + name_).c_str());
}

void SharedMemory::reserve(int64_t offset, int64_t bytes) {
  if (file_ < 0 || bytes == 0) return;
  int error = EINTR;
  while (error == EINTR) error = posix_fallocate(file_, offset, bytes);
  if (error == 0) return;
  struct statvfs space{};
  fstatvfs(file_, &space);
  throw std::runtime_error("All2All: /dev/shm must have room for " + std::to_string(bytes) + " bytes more, got " +
                           std::to_string(space.f_bavail * space.f_frsize) + " (" +
                           std::generic_category().message(error) + "; containers have an option --shm-size)");
}

void SharedMemory::lock(int64_t byte) {
  struct flock wanted = byte_lock(F_WRLCK, byte);
  LTX_CHECK(fcntl(file_, F_OFD_SETLK, &wanted) == 0,
            "All2All: cannot lock byte " + std::to_string(byte) + " of /dev/shm/" + name_ + ": " + error_text());
}

void SharedMemory::unlock(int64_t byte) {
  struct flock freed = byte_lock(F_UNLCK, byte);
  fcntl(file_, F_OFD_SETLK, &freed);
}

bool SharedMemory::is_locked_elsewhere(int64_t byte) const {
  struct flock asked = byte_lock(F_WRLCK, byte);
  return fcntl(file_, F_OFD_GETLK, &asked) != 0 || asked.l_type != F_UNLCK;
}

int remove_abandoned_memory() {
  int removed = 0;
  const std::string own_prefix = prefix();
  DIR* folder = opendir(kFolder);
  if (folder == nullptr) return 0;
  while (const dirent* entry = readdir(folder)) {  // NOLINT(concurrency-mt-unsafe): a stream of this call alone
    const std::string name = entry->d_name;
    if (!name.starts_with(own_prefix)) continue;
    const int file = ::open((kFolder + name).c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    if (file < 0) continue;
    if (flock(file, LOCK_EX | LOCK_NB) == 0 && ::unlink((kFolder + name).c_str()) == 0) ++removed;
    close(file);
  }
  closedir(folder);
  return removed;
}

}  // namespace ltx
