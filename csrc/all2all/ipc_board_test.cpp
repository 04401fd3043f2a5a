#include "all2all/ipc_board.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <random>
#include <thread>

#include "common/message_of.h"

namespace ltx {
namespace {

using Boards = std::vector<std::shared_ptr<IpcBoard>>;

const auto kNothing = [](IpcPost&) {};

// Each has opened the file for itself, as processes have.
Boards boards_of(int world_size) {
  Boards boards = {IpcBoard::create(0, world_size)};
  for (int rank = 1; rank < world_size; ++rank) boards.push_back(IpcBoard::open(boards[0]->name(), rank, world_size));
  boards[0]->unlink();
  return boards;
}

void each(const Boards& boards, const std::function<void(int, IpcBoard&)>& body) {
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < boards.size(); ++rank) {
    threads.emplace_back([&, rank] { body(static_cast<int>(rank), *boards[rank]); });
  }
  for (std::thread& thread : threads) thread.join();
}

// What a round without a part ends with.
Status status_of_round(IpcBoard& board, double timeout_seconds) {
  try {
    board.round(timeout_seconds, kNothing);
  } catch (const IpcAbsence& absence) {
    return absence.status;
  }
  return {};
}

Status timeout(uint8_t rank, uint8_t peers, uint32_t call = 0) {
  return {.kind = Status::Kind::kTimeout, .rank = rank, .peers = peers, .epoch = call};
}

// A process that opens the board as a rank, does `body`, tells so, and stays until it is killed.
pid_t process_of(const std::string& name, int rank, int world_size, const std::function<void(IpcBoard&)>& body) {
  std::array<int, 2> pipes{};
  if (pipe(pipes.data()) != 0) return -1;
  const pid_t child = fork();
  if (child == 0) {
    const auto board = IpcBoard::open(name, rank, world_size);
    body(*board);
    const char done = 1;
    while (write(pipes[1], &done, 1) == 1) pause();
  }
  char done = 0;
  EXPECT_EQ(read(pipes[0], &done, 1), 1);
  for (const int end : pipes) close(end);
  return child;
}

void kill_process(pid_t child) {
  kill(child, SIGKILL);
  EXPECT_EQ(waitpid(child, nullptr, 0), child);
}

TEST(IpcBoard, RoundsOfAllRanksUnderSkewAndCallsBetween) {
  constexpr int kRounds = 300;
  const Boards boards = boards_of(4);
  each(boards, [](int rank, IpcBoard& board) {
    std::mt19937 random(rank);
    for (int i = 0; i < kRounds; ++i) {
      if (random() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
      board.begin_call(i);
      const auto posts = board.round(20, [&](IpcPost& post) {
        post.device[0] = static_cast<uint8_t>(i);
        post.memory[63] = std::byte(10 * rank);
        post.no_access = i + rank;
      });
      ASSERT_EQ(posts.size(), 4u);
      for (int peer = 0; peer < 4; ++peer) {
        ASSERT_EQ(posts[peer].device[0], i % 256);
        ASSERT_EQ(posts[peer].memory[63], std::byte(10 * peer));
        ASSERT_EQ(posts[peer].no_access, static_cast<uint32_t>(i + peer));
        ASSERT_EQ(posts[peer].error[0], '\0');
      }
      board.begin_call(1000 + i);  // a call that needs no round: the others may still be in this one
    }
  });
}

TEST(IpcBoard, OneRankIsAlone) {
  const Boards boards = boards_of(1);
  EXPECT_EQ(boards[0]->round(0, kNothing).size(), 1u);
  EXPECT_FALSE(boards[0]->is_mapped());
}

TEST(IpcBoard, NamesWhoDoesNotComeInTime) {
  const Boards boards = boards_of(4);
  each(boards, [](int rank, IpcBoard& board) {
    if (rank == 1) return;
    if (rank == 3) std::this_thread::sleep_for(std::chrono::milliseconds(500));  // late, and in vain
    const auto begin = std::chrono::steady_clock::now();
    EXPECT_EQ(status_of_round(board, 0.2), timeout(rank, rank == 3 ? 0b0010 : 0b1010)) << rank;
    const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - begin;
    EXPECT_GE(waited.count(), 0.2);
    EXPECT_LT(waited.count(), 1.2);
  });
}

TEST(IpcBoard, WaitsForALateRank) {
  const Boards boards = boards_of(2);
  each(boards, [](int rank, IpcBoard& board) {
    if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(300));
    EXPECT_EQ(board.round(rank == 0 ? 0 : 20, kNothing).size(), 2u);  // 0: for ever
  });
}

TEST(IpcBoard, ErrorsOfAnyRankAreThoseOfAll) {
  const Boards boards = boards_of(3);
  each(boards, [](int rank, IpcBoard& board) {
    const std::string message = message_of([&] {
      board.round(20, [&](IpcPost&) {
        if (rank > 0) throw std::runtime_error("no memory " + std::to_string(rank));
      });
    });
    EXPECT_EQ(message, "All2All: rank 1: no memory 1; rank 2: no memory 2");
    EXPECT_EQ(board.round(20, kNothing).size(), 3u);  // and a new attempt can succeed
    const std::string long_message = message_of([&] {
      board.round(20, [&](IpcPost&) {
        if (rank == 0) throw std::runtime_error(std::string(1000, 'x'));
      });
    });
    EXPECT_EQ(long_message, "All2All: rank 0: " + std::string(511, 'x'));
  });
}

TEST(IpcBoard, PeersInAnotherCallAreFoundAtOnce) {
  for (const bool grows_too : {false, true}) {
    const Boards boards = boards_of(3);
    each(boards, [&](int rank, IpcBoard& board) {
      const uint64_t hash = rank == 1 ? 7 : 5;
      board.begin_call(hash);
      if (rank == 1 && !grows_too) return;
      const auto begin = std::chrono::steady_clock::now();
      const Status found = status_of_round(board, 20);
      EXPECT_EQ(found.kind, Status::Kind::kMismatch);
      EXPECT_NE(found.peers & (rank == 1 ? 0b101U : 0b010U), 0U);
      EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
    });
  }
}

TEST(IpcBoard, PeerThatIsPastThisCallDidNotGrowInIt) {
  const Boards boards = boards_of(2);
  for (const uint64_t hash : {5, 6}) boards[1]->begin_call(hash);
  boards[0]->begin_call(5);
  EXPECT_EQ(status_of_round(*boards[0], 20),
            (Status{.kind = Status::Kind::kMismatch, .rank = 0, .peers = 0b10, .epoch = 1}));
  boards[0]->begin_call(6);
  boards[0]->begin_call(7);
  EXPECT_EQ(status_of_round(*boards[0], 0.1), timeout(0, 0b10, 3));
}

TEST(IpcBoard, KilledRankIsNamed) {
  const auto board = IpcBoard::create(0, 3);
  const auto other = IpcBoard::open(board->name(), 2, 3);
  const pid_t child = process_of(board->name(), 1, 3, [](IpcBoard&) {});
  kill_process(child);
  each({board, other}, [](int i, IpcBoard& end) { EXPECT_EQ(status_of_round(end, 0.3), timeout(2 * i, 0b010)); });
}

TEST(IpcBoard, HasOneRankOfANumber) {
  const Boards boards = boards_of(2);
  const auto again = IpcBoard::create(0, 2);
  EXPECT_EQ(message_of([&] { IpcBoard::open(again->name(), 0, 2); }).find("All2All: cannot lock byte 0 of /dev/shm/"),
            0u);
}

TEST(IpcBoard, AccessIsCheckedForAllPairs) {
  std::vector<IpcPost> posts(3);
  for (int rank = 0; rank < 3; ++rank) posts[rank].device.fill(static_cast<uint8_t>(0x1A + rank));
  EXPECT_EQ(message_of([&] { check_ipc_access(posts); }), "no error");
  posts[0].no_access = 0b100;
  posts[2].no_access = 0b001;
  EXPECT_EQ(message_of([&] { check_ipc_access(posts); }),
            "All2All: GPUs must have access to each other's memory, got "
            "rank 0 (GPU-1a1a1a1a-1a1a-1a1a-1a1a-1a1a1a1a1a1a) without access to "
            "rank 2 (GPU-1c1c1c1c-1c1c-1c1c-1c1c-1c1c1c1c1c1c), "
            "rank 2 (GPU-1c1c1c1c-1c1c-1c1c-1c1c-1c1c1c1c1c1c) without access to "
            "rank 0 (GPU-1a1a1a1a-1a1a-1a1a-1a1a-1a1a1a1a1a1a)");
}

// Memory that peers may map is freed when none of them may, in whatever order they end.
TEST(IpcExports, MemoryOutlivesItsOwnerUntilNoPeerMapsIt) {
  for (const std::array<int, 3>& order : {std::array{0, 1, 2}, std::array{2, 0, 1}, std::array{1, 2, 0}}) {
    const Boards boards = boards_of(3);
    std::vector<std::unique_ptr<IpcExports>> exports;
    std::vector<std::weak_ptr<int>> memory;
    for (const auto& board : boards) {
      auto own = std::make_shared<int>();
      memory.push_back(own);
      exports.push_back(std::make_unique<IpcExports>(board));
      exports.back()->add(own);
    }
    for (int i = 0; i < 2; ++i) {
      exports[order[i]].reset();
      EXPECT_FALSE(memory[order[i]].expired()) << i;
    }
    EXPECT_FALSE(boards[order[2]]->is_mapped());
    EXPECT_TRUE(boards[order[0]]->is_mapped());
    exports[order[2]].reset();
    for (const auto& own : memory) EXPECT_TRUE(own.expired());
  }
}

TEST(IpcExports, ForkThatEndsKeepsTheLock) {
  const Boards boards = boards_of(2);
  auto exports = std::make_unique<IpcExports>(boards[0]);
  const pid_t child = fork();
  if (child == 0) {
    exports.reset();
    _exit(0);
  }
  EXPECT_EQ(waitpid(child, nullptr, 0), child);
  EXPECT_TRUE(boards[1]->is_mapped());
  exports.reset();
  EXPECT_FALSE(boards[1]->is_mapped());
}

TEST(IpcExports, DeathOfAPeerFreesMemoryAtTheNextGroup) {
  const auto board = IpcBoard::create(0, 2);
  const pid_t child = process_of(board->name(), 1, 2, [](IpcBoard&) {});
  auto own = std::make_shared<int>();
  const std::weak_ptr<int> memory = own;
  auto exports = std::make_unique<IpcExports>(board);
  exports->add(std::move(own));
  exports.reset();
  EXPECT_FALSE(memory.expired());
  kill_process(child);
  const IpcExports next(IpcBoard::create(0, 1));
  EXPECT_TRUE(memory.expired());
}

}  // namespace
}  // namespace ltx
