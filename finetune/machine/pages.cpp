// Memory of training's large tensors on the CPU, whose pages a rank keeps from one tensor to the next.
//
// A step makes and frees the same tensors again and again. The C library either gives each one's pages back to the system, which
// clears and maps them anew for the next tensor, or keeps them as gaps that no other size fits. Here a freed tensor's pages back
// whatever is made next: at the addresses where they are, or, where no free range is long enough, moved to a new one by
// mremap(2), which changes page tables and copies nothing. New pages are asked for only when no free one is left, so a rank never
// holds more than its tensors once took at the same time.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>

namespace {

using Address = std::uintptr_t;

const std::size_t kPage = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
constexpr std::size_t kLargePage = std::size_t{2} << 20;

std::size_t rounded_up(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit * unit; }

void* pointer(Address at) { return reinterpret_cast<void*>(at); }

struct Figures {
  std::int64_t live = 0;   // bytes of the tensors that there are
  std::int64_t held = 0;   // bytes of these and of free pages
  std::int64_t fresh = 0;  // bytes that the system was asked for, ever
  std::int64_t moved = 0;  // bytes of pages that were moved, ever
};

class Pages {
 public:
  void set(bool large_pages, std::size_t most_mappings) {
    const std::lock_guard<std::mutex> guard(lock_);
    large_pages_ = large_pages;
    most_mappings_ = most_mappings;
  }

  // A range of whole pages; nullptr where the system has no addresses or mappings left.
  void* take(std::size_t bytes) {
    const std::size_t size = rounded_up(bytes, kPage);
    const std::lock_guard<std::mutex> guard(lock_);
    Address at = from_free_range(size);
    if (at == 0) at = from_new_range(size);
    if (at == 0) return nullptr;
    taken_[at] = size;
    figures_.live += static_cast<std::int64_t>(size);
    return pointer(at);
  }

  // Whether the range was one of these; its pages are kept.
  bool give(void* begin) {
    const std::lock_guard<std::mutex> guard(lock_);
    const auto found = taken_.find(reinterpret_cast<Address>(begin));
    if (found == taken_.end()) return false;
    const auto [at, size] = *found;
    taken_.erase(found);
    figures_.live -= static_cast<std::int64_t>(size);
    add_free(at, size);
    return true;
  }

  void give_back() {
    const std::lock_guard<std::mutex> guard(lock_);
    release(static_cast<std::size_t>(figures_.held));
  }

  Figures figures() {
    const std::lock_guard<std::mutex> guard(lock_);
    return figures_;
  }

 private:
  // -- free ranges, neighbours joined

  void put(Address at, std::size_t size) {
    size_at_[at] = size;
    by_size_.insert({size, at});
  }

  void drop(Address at, std::size_t size) {
    size_at_.erase(at);
    by_size_.erase({size, at});
  }

  void add_free(Address at, std::size_t size) {
    const auto after = size_at_.find(at + size);
    if (after != size_at_.end()) {
      const std::size_t more = after->second;
      drop(at + size, more);
      size += more;
    }
    auto before = size_at_.lower_bound(at);
    if (before != size_at_.begin()) {
      before = std::prev(before);
      const auto [begin, length] = *before;
      if (begin + length == at) {
        drop(begin, length);
        at = begin;
        size += length;
      }
    }
    put(at, size);
  }

  // The shortest that is long enough; the rest of it stays free.
  Address from_free_range(std::size_t size) {
    const auto found = by_size_.lower_bound({size, 0});
    if (found == by_size_.end()) return 0;
    const auto [length, at] = *found;
    drop(at, length);
    if (length > size) put(at + size, length - size);
    return at;
  }

  // -- new ranges of addresses

  Address from_new_range(std::size_t size) {
    // Large pages begin where an address is a multiple of their size.
    const std::size_t asked = size >= kLargePage ? size + kLargePage : size;
    void* const mapped = mmap(nullptr, asked, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) return 0;
    Address at = reinterpret_cast<Address>(mapped);
    if (asked > size) {
      const Address begin = rounded_up(at, kLargePage);
      if (begin > at) munmap(pointer(at), begin - at);
      if (at + asked > begin + size) munmap(pointer(begin + size), at + asked - begin - size);
      at = begin;
    }
    if (end_of_.size() > most_mappings_) release(size);
    const std::size_t moved = move_free_pages(at, size);
    // A move that fails may have unmapped where it was to go.
    if (moved < size && !mapped_anew(at + moved, size - moved)) {
      munmap(pointer(at), size);
      cut_out(at, at + moved);
      figures_.held -= static_cast<std::int64_t>(moved);
      return 0;
    }
    if (moved < size) {
      end_of_[at + moved] = at + size;
      if (large_pages_ && size - moved >= kLargePage) madvise(pointer(at + moved), size - moved, MADV_HUGEPAGE);
      figures_.fresh += static_cast<std::int64_t>(size - moved);
      figures_.held += static_cast<std::int64_t>(size - moved);
    }
    return at;
  }

  // Whether all of these addresses could be mapped, in the place of what is there.
  static bool mapped_anew(Address at, std::size_t size) {
    const int how = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
    return mmap(pointer(at), size, PROT_READ | PROT_WRITE, how, -1, 0) != MAP_FAILED;
  }

  // Free pages to the beginning of a new range, the longest free ranges first; how many bytes.
  std::size_t move_free_pages(Address to, std::size_t size) {
    std::size_t moved = 0;
    while (moved < size && !by_size_.empty()) {
      const auto [length, from] = *std::prev(by_size_.end());
      // One mapping at a time: older kernels move no range that spans several.
      const std::size_t whole = std::min<std::size_t>(length, std::prev(end_of_.upper_bound(from))->second - from);
      const std::size_t part = std::min(whole, size - moved);
      if (mremap(pointer(from), part, part, MREMAP_MAYMOVE | MREMAP_FIXED, pointer(to + moved)) == MAP_FAILED) break;
      drop(from, length);
      if (part < length) put(from + part, length - part);
      cut_out(from, from + part);
      end_of_[to + moved] = to + moved + part;
      moved += part;
    }
    figures_.moved += static_cast<std::int64_t>(moved);
    return moved;
  }

  // Give at least so many bytes of free pages back to the system, the longest ranges first.
  void release(std::size_t bytes) {
    std::size_t gone = 0;
    while (gone < bytes && !by_size_.empty()) {
      const auto [length, at] = *std::prev(by_size_.end());
      if (munmap(pointer(at), length) != 0) return;
      drop(at, length);
      cut_out(at, at + length);
      figures_.held -= static_cast<std::int64_t>(length);
      gone += length;
    }
  }

  // These addresses are no longer mapped.
  void cut_out(Address begin, Address end) {
    if (begin == end) return;
    for (auto one = std::prev(end_of_.upper_bound(begin)); one != end_of_.end() && one->first < end;) {
      const auto [from, to] = *one;
      one = end_of_.erase(one);
      if (from < begin) end_of_[from] = begin;
      if (to > end) end_of_[end] = to;
    }
  }

  std::mutex lock_;
  bool large_pages_ = false;
  std::size_t most_mappings_ = 0;
  Figures figures_;
  std::unordered_map<Address, std::size_t> taken_;
  std::map<Address, std::size_t> size_at_;
  std::set<std::pair<std::size_t, Address>> by_size_;
  // Mappings by their begin, of which all that is held is made; the kernel may know some of them as one.
  std::map<Address, Address> end_of_;
};

// Never destroyed: tensors outlive what the C++ runtime takes down at the end.
Pages& pages() {
  static Pages* const only = new Pages;
  return *only;
}

std::size_t smallest = 0;

void give(void* data) {
  const bool whole_pages = reinterpret_cast<Address>(data) % kPage == 0;
  if (data == nullptr || (whole_pages && pages().give(data))) return;
  c10::free_cpu(data);
}

// What is smaller, and what finds no place, torch takes from the C library as ever.
struct PagesOrHeap final : c10::Allocator {
  c10::DataPtr allocate(std::size_t bytes) override {
    void* data = bytes >= smallest ? pages().take(bytes) : nullptr;
    if (data == nullptr) data = c10::alloc_cpu(bytes);
    return {data, data, &give, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &give; }

  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
};

}  // namespace

extern "C" {

void tessera_pages_start(std::size_t smallest_bytes, int large_pages, std::size_t most_mappings) {
  smallest = smallest_bytes;
  pages().set(large_pages != 0, most_mappings);
  static PagesOrHeap* const only = new PagesOrHeap;
  c10::SetCPUAllocator(only, 100);  // before torch's own, whatever has been chosen
}

void tessera_pages_give_back() { pages().give_back(); }

void tessera_pages_figures(std::int64_t* out) {
  const Figures figures = pages().figures();
  out[0] = figures.live;
  out[1] = figures.held;
  out[2] = figures.fresh;
  out[3] = figures.moved;
}

}  // extern "C"
