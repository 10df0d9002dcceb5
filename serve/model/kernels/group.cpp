// Sums, gathers and what the first rank tells the others of one machine, through memory that all of them have mapped.
//
// Each rank has two slots, used in turn, and a counter of the rounds in which it has filled one. In a round every rank fills its
// slot, says so, waits for the others and reads theirs. Who fills a slot again, two rounds later, has seen all others one round
// later: nobody reads it any more.
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <new>

#include "parts.h"
#include "vectors.h"

namespace {

constexpr int64_t kSlotBytes = int64_t(1) << 20;
constexpr int64_t kLineBytes = 128;  // a counter's own cache line, and its neighbour, which is fetched with it
constexpr int64_t kRun = 4096;  // numbers that one thread adds up
constexpr int64_t kLeastSpin = 4'000, kMostSpin = 200'000;  // nanoseconds

struct Line {
    std::atomic<uint32_t> round;
    std::atomic<uint32_t> sleepers;
};
static_assert(std::atomic<uint32_t>::is_always_lock_free, "processes share these");

struct Group {
    int rank, size;
    uint32_t round = 0;
    int64_t spin = kMostSpin;  // how long a wait is worth not sleeping: longer where that was enough, shorter where it was not
    char* memory;
    int64_t bytes;

    Line& line(int of) const { return *reinterpret_cast<Line*>(memory + of * kLineBytes); }
    char* slot(int of, uint32_t in) const { return memory + size * kLineBytes + (int64_t(of) * 2 + (in & 1)) * kSlotBytes; }
};

int64_t bytes_of(int size) { return size * (kLineBytes + 2 * kSlotBytes); }

inline int64_t now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return int64_t(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
}

inline void rest() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

inline bool has_reached(const Line& line, uint32_t round) {
    return int32_t(line.round.load(std::memory_order_acquire) - round) >= 0;  // counters begin anew after 2^32 rounds
}

void wait_for(Group& group, Line& line) {
    const uint32_t round = group.round;
    if (has_reached(line, round)) return;
    const int64_t until = now() + group.spin;
    do {
        for (int turn = 0; turn < 32; ++turn) {
            if (has_reached(line, round)) {
                group.spin = std::min(kMostSpin, group.spin * 2);
                return;
            }
            rest();
        }
    } while (now() < until);
    group.spin = std::max(kLeastSpin, group.spin / 2);
    line.sleepers.fetch_add(1);
    for (;;) {
        const uint32_t seen = line.round.load();
        if (int32_t(seen - round) >= 0) break;
        // It returns at once if the counter has moved, and after a signal; a rank that never comes is its supervisor's to see.
        syscall(SYS_futex, &line.round, FUTEX_WAIT, seen, nullptr, nullptr, 0);
    }
    line.sleepers.fetch_sub(1);
}

// This rank's slot of the coming round is full: say so, and wait until all are.
void meet(Group& group) {
    Line& own = group.line(group.rank);
    own.round.store(++group.round);
    if (own.sleepers.load()) syscall(SYS_futex, &own.round, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    for (int other = 0; other < group.size; ++other)
        if (other != group.rank) wait_for(group, group.line(other));
}

// Always from the first rank to the last: every rank gets the same bits.
void add_up(const Group& group, float* out, int64_t begin, int64_t end) {
    const float* first = reinterpret_cast<const float*>(group.slot(0, group.round));
    const float* second = reinterpret_cast<const float*>(group.slot(1, group.round));
    for (int64_t i = begin; i < end; ++i) out[i] = first[i] + second[i];
    for (int of = 2; of < group.size; ++of) {
        const float* more = reinterpret_cast<const float*>(group.slot(of, group.round));
        for (int64_t i = begin; i < end; ++i) out[i] += more[i];
    }
}

// In fp32, rounded once.
void add_up(const Group& group, bf16* out, int64_t begin, int64_t end) {
    constexpr int64_t kPart = 1024;
    float total[kPart];
    for (int64_t from = begin; from < end; from += kPart) {
        const int64_t count = std::min(kPart, end - from);
        for (int of = 0; of < group.size; ++of) {
            const bf16* part = reinterpret_cast<const bf16*>(group.slot(of, group.round)) + from;
            if (of == 0)
                for (int64_t i = 0; i < count; ++i) total[i] = to_float(part[i]);
            else
                for (int64_t i = 0; i < count; ++i) total[i] += to_float(part[i]);
        }
        for (int64_t i = 0; i < count; ++i) from_float(total[i], out[from + i]);
    }
}

// By all threads of a parallel region: one of them meets the other ranks.
template <typename number>
void sum(Group& group, number* data, int64_t count, int64_t* begun) {
    constexpr int64_t most = kSlotBytes / int64_t(sizeof(number));
    for (int64_t done = 0; done < count; done += most) {
        const int64_t part = std::min(most, count - done);
#pragma omp single
        {
            if (done == 0) __atomic_add_fetch(begun, 1, __ATOMIC_RELAXED);
            std::memcpy(group.slot(group.rank, group.round + 1), data + done, size_t(part) * sizeof(number));
            meet(group);
        }
#pragma omp for schedule(static)
        for (int64_t begin = 0; begin < part; begin += kRun) add_up(group, data + done, begin, std::min(part, begin + kRun));
    }
}

// Numbers [begin, begin + count) of a rank's [R, width], row after row, to where its columns are in [R, all].
void place(const float* part, int64_t begin, int64_t count, int64_t width, float* out, int64_t all) {
    for (int64_t done = 0; done < count;) {
        const int64_t row = (begin + done) / width, column = (begin + done) % width;
        const int64_t run = std::min(width - column, count - done);
        std::memcpy(out + row * all + column, part + done, size_t(run) * sizeof(float));
        done += run;
    }
}

}  // namespace

// The ranks' numbers added up, in place, on every rank.
void tessera::add_ranks(const Job& job) {
    Group& group = *static_cast<Group*>(const_cast<void*>(job.x));
    int64_t* begun = static_cast<int64_t*>(const_cast<void*>(job.y));
    const int64_t count = job.rows * job.width;
    if (job.is_bf16)
        sum(group, static_cast<bf16*>(job.out), count, begun);
    else
        sum(group, static_cast<float*>(job.out), count, begun);
}

extern "C" {

// A rank's place in memory that all ranks have a descriptor of, filled with zeros at first; NULL where it cannot be mapped.
void* tessera_group_open(int descriptor, int rank, int size) {
    const int64_t bytes = bytes_of(size);
    if (ftruncate(descriptor, bytes) != 0) return nullptr;
    void* memory = mmap(nullptr, size_t(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (memory == MAP_FAILED) return nullptr;
    Group* group = new (std::nothrow) Group;
    if (group == nullptr) {
        munmap(memory, size_t(bytes));
        return nullptr;
    }
    group->rank = rank, group->size = size, group->memory = static_cast<char*>(memory), group->bytes = bytes;
    return group;
}

void tessera_group_close(void* opened) {
    Group* group = static_cast<Group*>(opened);
    munmap(group->memory, size_t(group->bytes));
    delete group;
}

// Each rank has [R, widths[rank]]; rank 0 gets them side by side in ``out``, the others give NULL.
void tessera_group_gather(void* opened, const float* own, int64_t R, const int64_t* widths, float* out) {
    Group& group = *static_cast<Group*>(opened);
    constexpr int64_t most = kSlotBytes / int64_t(sizeof(float));
    int64_t all = 0, longest = 0;
    for (int of = 0; of < group.size; ++of) all += widths[of];
    for (int of = 1; of < group.size; ++of) longest = std::max(longest, R * widths[of]);
    for (int64_t begin = 0; begin < longest; begin += most) {
        const int64_t mine = std::min(most, R * widths[group.rank] - begin);
        if (group.rank != 0 && mine > 0)
            std::memcpy(group.slot(group.rank, group.round + 1), own + begin, size_t(mine) * sizeof(float));
        meet(group);
        if (group.rank != 0) continue;
        int64_t column = widths[0];
        for (int of = 1; of < group.size; column += widths[of++]) {
            const int64_t count = std::min(most, R * widths[of] - begin);
            if (count > 0)
                place(reinterpret_cast<const float*>(group.slot(of, group.round)), begin, count, widths[of], out + column, all);
        }
    }
    if (group.rank == 0) place(own, 0, R * widths[0], widths[0], out, all);
}

// The first rank's bytes, on every rank, in place.
void tessera_group_tell(void* opened, void* data, int64_t bytes) {
    Group& group = *static_cast<Group*>(opened);
    char* own = static_cast<char*>(data);
    for (int64_t done = 0; done < bytes; done += kSlotBytes) {
        const size_t part = size_t(std::min(kSlotBytes, bytes - done));
        if (group.rank == 0) std::memcpy(group.slot(0, group.round + 1), own + done, part);
        meet(group);
        if (group.rank != 0) std::memcpy(own + done, group.slot(0, group.round), part);
    }
}
}
