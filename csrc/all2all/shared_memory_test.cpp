#include "all2all/shared_memory.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstring>

#include "common/message_of.h"

namespace ltx {
namespace {

std::string path_of(const SharedMemory& memory) { return "/dev/shm/" + memory.name(); }

bool exists(const std::string& path) { return access(path.c_str(), F_OK) == 0; }

TEST(SharedMemory, IsSharedAndForThisUserOnly) {
  const auto memory = SharedMemory::create(10000);
  EXPECT_EQ(memory->name().find("ltx-kernels-" + std::to_string(getuid()) + "-"), 0u);
  struct stat status{};
  ASSERT_EQ(stat(path_of(*memory).c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0600u);
  const auto other = SharedMemory::open(memory->name(), 10000);
  memory->reserve(5000, 5000);
  EXPECT_EQ(other->data()[9999], std::byte{0});
  memory->data()[9999] = std::byte{7};
  EXPECT_EQ(other->data()[9999], std::byte{7});
  ASSERT_EQ(stat(path_of(*memory).c_str(), &status), 0);
  EXPECT_LE(status.st_blocks * 512, 8192);  // only what was reserved has pages
}

TEST(SharedMemory, OutlivesItsName) {
  auto memory = SharedMemory::create(4096);
  const std::string path = path_of(*memory);
  const auto other = SharedMemory::open(memory->name(), 4096);
  EXPECT_TRUE(exists(path));
  memory->unlink();
  EXPECT_FALSE(exists(path));
  memory.reset();
  other->data()[0] = std::byte{1};
}

TEST(SharedMemory, WhoGivesUpLeavesNoFile) {
  for (const bool creator : {true, false}) {
    auto memory = SharedMemory::create(4096);
    auto other = SharedMemory::open(memory->name(), 4096);
    const std::string path = path_of(*memory);
    (creator ? memory : other).reset();
    EXPECT_FALSE(exists(path)) << creator;
  }
}

TEST(SharedMemory, AbandonedFilesGoAndHeldOnesStay) {
  const auto held = SharedMemory::create(4096);
  const std::string path = "/dev/shm/ltx-kernels-" + std::to_string(getuid()) + "-abandoned";
  const std::string other_user = "/dev/shm/ltx-kernels-" + std::to_string(getuid() + 1) + "-abandoned";
  for (const std::string& file : {path, other_user}) close(open(file.c_str(), O_CREAT | O_RDWR, 0600));
  EXPECT_GE(remove_abandoned_memory(), 1);
  EXPECT_FALSE(exists(path));
  EXPECT_TRUE(exists(other_user));
  EXPECT_TRUE(exists(path_of(*held)));
  unlink(other_user.c_str());
}

TEST(SharedMemory, LocksOfBytesAreFreedByWhoHoldsThemOrDies) {
  const auto one = SharedMemory::create(4096);
  const auto two = SharedMemory::open(one->name(), 4096);
  one->lock(3);
  EXPECT_TRUE(two->is_locked_elsewhere(3));
  EXPECT_FALSE(two->is_locked_elsewhere(4));
  EXPECT_FALSE(one->is_locked_elsewhere(3));
  EXPECT_EQ(message_of([&] { two->lock(3); }),
            "All2All: cannot lock byte 3 of /dev/shm/" + one->name() + ": Resource temporarily unavailable");
  one->unlock(3);
  two->lock(3);
  EXPECT_TRUE(one->is_locked_elsewhere(3));

  std::array<int, 2> pipes{};
  ASSERT_EQ(pipe(pipes.data()), 0);
  const pid_t child = fork();
  if (child == 0) {
    const auto theirs = SharedMemory::open(one->name(), 4096);
    theirs->lock(5);
    const char locked = 1;
    while (write(pipes[1], &locked, 1) == 1) pause();
  }
  char locked = 0;
  ASSERT_EQ(read(pipes[0], &locked, 1), 1);
  EXPECT_TRUE(one->is_locked_elsewhere(5));
  kill(child, SIGKILL);
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  EXPECT_FALSE(one->is_locked_elsewhere(5));
}

TEST(SharedMemory, RefusesByName) {
  EXPECT_EQ(message_of([] { SharedMemory::open("passwd", 1); }),
            "All2All: shared memory must be named ltx-kernels-" + std::to_string(getuid()) + "-..., got passwd");
  const std::string absent = "ltx-kernels-" + std::to_string(getuid()) + "-absent";
  EXPECT_EQ(message_of([&] { SharedMemory::open(absent, 1); }),
            "All2All: cannot open /dev/shm/" + absent + ": No such file or directory");
  EXPECT_EQ(message_of([] { SharedMemory::create(int64_t{1} << 50); }),
            "All2All: cannot map 1125899906842624 bytes: Cannot allocate memory");  // and no file is left
  const auto memory = SharedMemory::create(int64_t{1} << 44);
  const std::string message = message_of([&] { memory->reserve(0, int64_t{1} << 44); });
  EXPECT_EQ(message.find("All2All: /dev/shm must have room for 17592186044416 bytes more, got "), 0u) << message;
}

TEST(SharedMemory, OfThisProcessHasNoFile) {
  const auto memory = SharedMemory::of_this_process(1 << 20);
  EXPECT_EQ(memory->name(), "");
  memory->reserve(0, 1 << 20);
  EXPECT_EQ(memory->data()[(1 << 20) - 1], std::byte{0});
}

}  // namespace
}  // namespace ltx
