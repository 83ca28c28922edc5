#include "ptx/shared_memory.hpp"

#include <cstring>
#include <string>

namespace ptxrun {

SharedMemory::SharedMemory(std::size_t bytes) : bytes_(bytes, 0xff), words_((bytes + 3) / 4) {}

std::size_t SharedMemory::place(std::uint32_t address, std::uint32_t bytes) const {
  const std::size_t offset = std::size_t{address} - shared_base;
  if (address < shared_base || offset + bytes > bytes_.size())
    throw Fault("shared memory: offset " +
                std::to_string(static_cast<std::int64_t>(address) - shared_base) + " of " +
                std::to_string(bytes_.size()) + " bytes");
  if (offset % bytes != 0)
    throw Fault("shared memory: misaligned: " + std::to_string(bytes) + " bytes at offset " +
                std::to_string(offset));
  return offset;
}

// Whether `user` comes after `use` only by chance. What lanes of a warp do is ordered where all of
// them have met between, in an mma, a shuffle or the like.
bool SharedMemory::races(const Use& use, User user) const {
  if (use.epoch != epoch_ || use.user.number == user.number) return false;
  return use.user.number == several || use.user.warp() != user.warp() ||
         use.user.meetings == user.meetings;
}

const unsigned char* SharedMemory::read(std::uint32_t address, std::uint32_t bytes, User user) {
  const std::size_t offset = place(address, bytes);
  for (std::size_t w = offset / 4; w <= (offset + bytes - 1) / 4; ++w) {
    Word& word = words_[w];
    const unsigned wanted = bytes >= 4 ? 15u : ((1u << bytes) - 1) << offset % 4;
    if (word.under_way)
      throw Fault("shared memory: read before the copy to it has been waited for");
    if ((word.written & wanted) != wanted) throw Fault("shared memory: read of what nobody wrote");
    if (races(word.write, user))
      throw Fault("shared memory: race: read of what thread " +
                  std::to_string(word.write.user.number) + " wrote, without a barrier between");
    if (word.read.epoch != epoch_ || word.read.user.number == user.number)
      word.read.user = user;
    else if (word.read.user.number != several)
      word.read.user = word.read.user.warp() == user.warp()
                           ? User::lanes(user.warp(), user.meetings)
                           : User{several, 0};
    word.read.epoch = epoch_;
  }
  return bytes_.data() + offset;
}

void SharedMemory::check_write(const Word& word, User user, bool same_value) const {
  if (word.under_way)
    throw Fault("shared memory: written before the copy to it has been waited for");
  if (races(word.read, user))
    throw Fault("shared memory: race: thread " + std::to_string(user.number) +
                " writes where another has read, without a barrier between");
  if (races(word.write, user) && !same_value)
    throw Fault("shared memory: race: threads " + std::to_string(word.write.user.number) + " and " +
                std::to_string(user.number) + " write, without a barrier between");
}

void SharedMemory::write(std::uint32_t address, const void* from, std::uint32_t bytes, User user) {
  const std::size_t offset = place(address, bytes);
  unsigned char* const to = bytes_.data() + offset;
  const bool same = std::memcmp(to, from, bytes) == 0;
  for (std::size_t w = offset / 4; w <= (offset + bytes - 1) / 4; ++w) {
    check_write(words_[w], user, same);
    words_[w].written |=
        static_cast<std::uint8_t>(bytes >= 4 ? 15u : ((1u << bytes) - 1) << offset % 4);
    words_[w].write = {user, epoch_};
  }
  std::memcpy(to, from, bytes);
}

void SharedMemory::begin_copy(std::uint32_t address, User user) {
  const std::size_t offset = place(address, 16);
  for (std::size_t w = offset / 4; w < offset / 4 + 4; ++w) {
    check_write(words_[w], user, false);
    words_[w].under_way = true;
  }
  std::memset(bytes_.data() + offset, 0xff, 16);
}

void SharedMemory::land_copy(std::uint32_t address, const void* from, std::uint32_t bytes,
                             User user) {
  const std::size_t offset = place(address, 16);
  for (std::size_t w = offset / 4; w < offset / 4 + 4; ++w) {
    words_[w].write = {user, epoch_};
    words_[w].written = 15;
    words_[w].under_way = false;
  }
  std::memset(bytes_.data() + offset, 0, 16);
  std::memcpy(bytes_.data() + offset, from, bytes);
}

}  // namespace ptxrun
