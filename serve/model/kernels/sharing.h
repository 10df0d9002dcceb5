// A product's panels, shared out among the threads of a parallel region.
//
// Each thread has a run of items, one behind the other in memory, so that what it asks for ahead of time is its own until the run is
// done; then it takes items from the ends of others', since another thread of the machine may hold one of ours up. A run is one
// word, [round | begin | end], which its owner shortens at the front and others at the back.
#pragma once

#include <omp.h>

#include <atomic>
#include <cstdint>
#include <memory>

namespace tessera {

// What the threads of one region share.
class Team {
public:
    explicit Team(int threads) : runs_(new Run[size_t(threads)]) {}

private:
    friend class Hand;
    struct alignas(128) Run {  // a cache line, and its neighbour, which is fetched with it
        std::atomic<uint64_t> word{0};
    };
    std::unique_ptr<Run[]> runs_;
    std::unique_ptr<char[]> shared_;
    int64_t shared_bytes_ = 0;
};

// One thread of a team. All of a team's share the same items out, one round after the other.
class Hand {
public:
    explicit Hand(Team& team) : team_(team), runs_(team.runs_.get()), own_(omp_get_thread_num()), size_(omp_get_num_threads()) {}

    // ``work(item)`` for each of [0, items), by all threads; none returns before all is done.
    template <typename Work>
    void share_out(int64_t items, const Work& work) {
        int64_t done = 0;
        do {
            begin(items - done < kMost ? items - done : kMost);
            for (int64_t item; (item = next()) >= 0;) work(done + item);
#pragma omp barrier
        } while ((done += kMost) < items);
    }

    // Memory of so many bytes that all threads of the team have, until they ask again. All ask, for the same. The thread that began
    // the region makes it: what it gives back it is given again, whichever thread comes first.
    char* shared(int64_t bytes) {
#pragma omp master
        if (team_.shared_bytes_ < bytes) {
            team_.shared_.reset();
            team_.shared_.reset(new char[size_t(bytes)]);
            team_.shared_bytes_ = bytes;
        }
#pragma omp barrier
        return team_.shared_.get();
    }

private:
    static constexpr int kBits = 24;
    static constexpr int64_t kMost = (int64_t(1) << kBits) - 1;
    typedef uint16_t Round;  // every word is of this round or of the one before

    static Round round_of(uint64_t word) { return Round(word >> 2 * kBits); }
    static int64_t begin_of(uint64_t word) { return int64_t(word >> kBits) & kMost; }
    static int64_t end_of(uint64_t word) { return int64_t(word) & kMost; }

    uint64_t whole_run(int of) const {
        return uint64_t(round_) << 2 * kBits | uint64_t(items_ * of / size_) << kBits | uint64_t(items_ * (of + 1) / size_);
    }

    // Of this thread's own word: another may have taken from its run before it came.
    void begin(int64_t items) {
        items_ = items, ++round_;
        std::atomic<uint64_t>& word = runs_[own_].word;
        for (uint64_t seen = word.load(); round_of(seen) != round_ && !word.compare_exchange_weak(seen, whole_run(own_));) {
        }
    }

    int64_t next() {
        for (int of = own_; of < own_ + size_; ++of) {
            const int64_t item = take(of % size_);
            if (item >= 0) return item;
        }
        return -1;
    }

    // An item of a run, or -1 where none is left.
    int64_t take(int of) {
        std::atomic<uint64_t>& word = runs_[of].word;
        for (uint64_t seen = word.load();;) {
            const uint64_t left = round_of(seen) == round_ ? seen : whole_run(of);
            if (begin_of(left) == end_of(left)) return -1;
            const uint64_t rest = of == own_ ? left + (uint64_t(1) << kBits) : left - 1;
            if (word.compare_exchange_weak(seen, rest)) return of == own_ ? begin_of(left) : end_of(rest);
        }
    }

    Team& team_;
    Team::Run* runs_;
    int own_, size_;
    int64_t items_ = 0;
    Round round_ = 0;
};

}  // namespace tessera
