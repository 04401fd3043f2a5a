#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

// Memory that several processes, or several threads of one, map.
//
// Between processes it is a file ltx-kernels-<uid>-<random> in /dev/shm, for this user only (mode 0600). One rank
// creates it and holds a lock on it (flock), the others open it by its name, and as soon as all have, they unlink the
// name: from then on the memory goes with the last process that maps it, however that ends. A rank that gives up before
// unlinks the name too: the group cannot be set up without it. Where all die before, a file is left whose lock is free:
// the next group removes it.
namespace ltx {

class SharedMemory {
 public:
  static std::shared_ptr<SharedMemory> of_this_process(int64_t bytes);
  static std::shared_ptr<SharedMemory> create(int64_t bytes);
  static std::shared_ptr<SharedMemory> open(const std::string& name, int64_t bytes);

  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;
  ~SharedMemory();

  std::byte* data() const { return data_; }
  const std::string& name() const { return name_; }
  void unlink();

  // Has pages for a part of it, filled with zeros: else a full /dev/shm would end the process at a store.
  void reserve(int64_t offset, int64_t bytes);

  // Locks of single bytes, each held by who has opened the file and at most one of them; the end of the process,
  // however it comes, frees them. Who forks shares them with the child.
  void lock(int64_t byte);
  void unlock(int64_t byte);
  bool is_locked_elsewhere(int64_t byte) const;

 private:
  SharedMemory(int file, int64_t bytes, std::string name);
  void map();

  int file_;  // -1: of this process
  int64_t bytes_;
  std::string name_;
  bool linked_ = false;
  std::byte* data_ = nullptr;
};

// Removes this user's files that no living creator holds; how many. create() calls it.
int remove_abandoned_memory();

}  // namespace ltx
