#include "all2all/workspace.h"

#include <gtest/gtest.h>

namespace ltx {
namespace {

TEST(Workspace, LaysOutControlAndTwoSlots) {
  // 2 + 8 lines of 128 bytes; slots of three results of 1000 bytes, each on its own 256 bytes.
  constexpr Layout kTwo = make_layout(2, 1000);
  EXPECT_EQ(kTwo.result_bytes, 1024);
  EXPECT_EQ(kTwo.slot_bytes, 3072);
  EXPECT_EQ(kTwo.slot_offset(0), 1280);
  EXPECT_EQ(kTwo.slot_offset(1), 4352);
  EXPECT_EQ(kTwo.total_bytes(), 7424);
  EXPECT_EQ(kTwo.slot_offset(0) % kSlotAlignment, 0);
  // From four ranks on allgather needs more than q, k and v.
  EXPECT_EQ(make_layout(8, 1024).slot_bytes, 8192);
  EXPECT_EQ(make_layout(1, 0).total_bytes(), 1280);
}

TEST(Workspace, SizesOfTheLargestResultFit64Bits) {
  EXPECT_EQ(make_layout(kMaxRanks, kMaxResultBytes).total_bytes(), (int64_t{1} << 60) + 1280);
}

TEST(Workspace, StatusIsOneWord) {
  const Status status{.kind = Status::Kind::kMismatch, .op = 3, .rank = 7, .peers = 0b10000001, .epoch = 0xFEDCBA98};
  EXPECT_EQ(pack(status), 0xFEDCBA9881070302);
  EXPECT_EQ(unpack(0xFEDCBA9881070302), status);
  EXPECT_EQ(pack({}), 0u);
}

TEST(Workspace, HashIsFnv1a) {
  // The published values for "", "a" and "foobar".
  EXPECT_EQ(kHashBasis, 0xCBF29CE484222325);
  EXPECT_EQ(hash_bytes(kHashBasis, 'a', 1), 0xAF63DC4C8601EC8C);
  EXPECT_EQ(hash_bytes(kHashBasis, 0x7261626F6F66, 6), 0x85944171F73967E8);
  EXPECT_EQ(hash_word(kHashBasis, 0x7261626F6F66), hash_bytes(0x85944171F73967E8, 0, 2));
}

}  // namespace
}  // namespace ltx
