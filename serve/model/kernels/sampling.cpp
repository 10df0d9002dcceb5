// Sampling: the peak of each row of logits, penalties, and a draw by temperature, min-p, top-k, top-p and typical-p.
//
// Shapes.  V vocabulary   a row is fp32 [V]
//
// A row is gone through a few times in order, never sorted whole: a lower bound below which nothing can be kept leaves few
// candidates where the row is peaked, and a histogram finds the place of the cut where it is flat (candidates.h). Among equal
// logits the smaller id counts as the likelier.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#include "candidates.h"
#include "vectors.h"

namespace {

constexpr int64_t kChunk = 64;     // logits whose maximum is kept: the k-th largest of the maxima bounds the k-th largest of all
constexpr float kNone = -std::numeric_limits<float>::infinity();

struct Rule {
    float temperature;
    float floor;  // log of min-p; minus infinity where there is none
    int64_t top_k;  // V where there is none
    double top_p, typical_p;
    double uniform;
};

// The sum of exp((x - peak) / T) over what reaches the floor.
double whole_mass(const float* row, int64_t V, float peak, const Rule& rule) {
    double total = 0.0;
    int64_t i = 0;
    for (; i + kLanes <= V;) {
        constexpr int kVectors = kLanes / kFloats;  // sums of sixteen lanes on all processors
        fvec sum[kVectors]{};
        const int64_t end = std::min(V - kLanes + 1, i + 2048);
        for (; i < end; i += kLanes) {
            for (int k = 0; k < kVectors; ++k) {
                const fvec x = (load_as<fvec>(row + i + k * kFloats) - peak) / rule.temperature;
                const fvec e = exp_nonpositive(x);
                sum[k] += x < filled<fvec>(rule.floor) ? fvec{} : e;
            }
        }
        for (int lane = 0; lane < kLanes; ++lane) total += double(sum[lane / kFloats][lane % kFloats]);
    }
    for (; i < V; ++i) {
        const float x = (row[i] - peak) / rule.temperature;
        if (!(x < rule.floor)) total += double(exp_nonpositive(x));
    }
    return total;
}

// A token of a row whose ``peak`` is finite. ``s.maxima`` are those of its chunks, where top-k is wanted.
int64_t draw(const float* row, int64_t V, float peak, const Rule& rule, Scratch& s) {
    const bool cuts_k = rule.top_k < V, cuts_p = rule.top_p < 1.0, cuts_typical = rule.typical_p < 1.0;
    float bound = rule.floor;
    double total = 0.0;
    if (cuts_k && rule.top_k <= int64_t(s.maxima.size())) {
        std::nth_element(s.maxima.begin(), s.maxima.begin() + (rule.top_k - 1), s.maxima.end(), std::greater<float>());
        bound = std::max(bound, (s.maxima[size_t(rule.top_k - 1)] - peak) / rule.temperature);
    } else if (!cuts_k && cuts_p) {
        total = whole_mass(row, V, peak, rule);
        // All that is below it together is less than what top-p leaves out. The margin is for rounding.
        const double rest = (1.0 - rule.top_p) * total / double(V);
        if (rest > 0.0) bound = std::max(bound, float(std::log(rest)) - 1e-3f);
    }
    collect(row, V, peak, rule.temperature, bound, s.list);
    if (cuts_k) cut_top_k(s, rule.top_k);
    s.list.weigh();
    Entry last;
    if (cuts_p && find_top_p(s, cuts_k ? s.list.total() : total, rule.top_p, last)) {
        if (cuts_typical)
            keep_up_to(s.list, last);
        else
            weigh_up_to(s.list, last);
    }
    if (cuts_typical) cut_typical(s, rule.typical_p);
    return token_at(s.list, rule.uniform);
}

struct Penalties {
    float again, once, each;  // repetition, presence, frequency
    bool subtracts() const { return once != 0.0f || each != 0.0f; }
};

// The different tokens of a sequence, ascending, and how often each was generated.
struct Seen {
    const int32_t* id;
    const int32_t* time;
    int64_t count;
};

// What became of the largest logit of a stretch: whether it was among those changed, and the largest that these are now.
struct Changed {
    bool most = false;
    float now = kNone;
};

// Change the logits of tokens seen, from the ``next``-th on, as long as they stand before ``end``; ``most`` is the largest of these
// and of their neighbours. Four at a time on all processors: it is not the arithmetic that takes long.
template <bool subtracts>
Changed penalise(float* row, const Seen& seen, int64_t& next, int64_t end, const Penalties& by, float most) {
    typedef float quad __attribute__((vector_size(16)));
    typedef int32_t whole_quad __attribute__((vector_size(16)));
    const int32_t* id = seen.id;
    int64_t i = next;
    quad now = filled<quad>(kNone);
    whole_quad reached{};
    for (; i + 4 <= seen.count && id[i + 3] < end; i += 4) {
        __builtin_prefetch(id + i + 512);
        quad x{row[id[i]], row[id[i + 1]], row[id[i + 2]], row[id[i + 3]]};
        reached |= x >= most;
        x = x > quad{} ? x / by.again : x * by.again;
        if constexpr (subtracts) {
            whole_quad times;
            std::memcpy(&times, seen.time + i, sizeof(times));
            x -= times > 0 ? by.once + by.each * __builtin_convertvector(times, quad) : quad{};
        }
        now = x > now ? x : now;
        for (int k = 0; k < 4; ++k) row[id[i + k]] = x[k];
    }
    Changed found;
    for (int k = 0; k < 4; ++k) {
        found.most |= reached[k] != 0;
        found.now = std::max(found.now, now[k]);
    }
    for (; i < seen.count && id[i] < end; ++i) {
        float x = row[id[i]];
        found.most |= x >= most;
        x = x > 0.0f ? x / by.again : x * by.again;
        if (subtracts && seen.time[i] > 0) x -= by.once + by.each * float(seen.time[i]);
        found.now = std::max(found.now, x);
        row[id[i]] = x;
    }
    next = i;
    return found;
}

// The largest of a stretch of a row. NaN is passed over; whether there is one is told where it ``checks``.
template <bool checks>
float highest_from(const float* row, int64_t begin, int64_t end, bool& nan) {
    constexpr int kSide = 4;
    float most = kNone;
    int64_t i = begin;
    if (end - begin >= kSide * kFloats) {
        fvec m[kSide];
        wvec odd{};
        for (fvec& each : m) each = filled<fvec>(kNone);
        for (; i + kSide * kFloats <= end; i += kSide * kFloats) {
            for (int k = 0; k < kSide; ++k) {
                const fvec x = load_as<fvec>(row + i + k * kFloats);
                m[k] = x > m[k] ? x : m[k];
                if constexpr (checks) odd |= x != x;
            }
        }
        for (int k = 1; k < kSide; ++k) m[0] = m[k] > m[0] ? m[k] : m[0];
        most = highest_of(m[0]);
        for (int lane = 0; checks && lane < kFloats; ++lane) nan |= odd[lane] != 0;
    }
    for (; i < end; ++i) {
        most = row[i] > most ? row[i] : most;
        if (checks) nan |= row[i] != row[i];
    }
    return most;
}

// The same, of a stretch of whole chunks but for a row's last one; the maxima of its chunks as well.
template <bool checks>
float highest_of_chunks(const float* row, int64_t begin, int64_t end, float* maxima, bool& nan) {
    float most = kNone;
    wvec odd{};
    int64_t i = begin;
    for (; i + kChunk <= end; i += kChunk) {
        fvec m = load_as<fvec>(row + i);
        if constexpr (checks) odd |= m != m;
        for (int64_t k = kFloats; k < kChunk; k += kFloats) {
            const fvec x = load_as<fvec>(row + i + k);
            m = x > m ? x : m;
            if constexpr (checks) odd |= x != x;
        }
        maxima[i / kChunk] = highest_of(m);
        most = std::max(most, maxima[i / kChunk]);
    }
    for (int lane = 0; checks && lane < kFloats; ++lane) nan |= odd[lane] != 0;
    if (i < end) {
        maxima[i / kChunk] = highest_from<checks>(row, i, end, nan);
        most = std::max(most, maxima[i / kChunk]);
    }
    return most;
}

// The peak of a row as it comes and as penalties leave it, NaN where the row holds one, and where to look for the latter.
struct Peaks {
    float raw = kNone, left = kNone;
    int64_t from = 0;
    int64_t place(const float* row, int64_t V) const {
        int64_t at = from;
        while (at < V - 1 && row[at] != left) ++at;
        return at;
    }
};

// Go through a row once for its peaks: a stretch of it is penalised, and the maxima of its chunks are found where they are wanted,
// while the processor has it at hand.
template <int kStretch>
Peaks look(float* row, int64_t V, const Seen& seen, const Penalties& by, float* maxima) {
    static_assert(kStretch % kChunk == 0, "a chunk lies in one stretch");
    Peaks found;
    bool nan = false;
    for (int64_t begin = 0, next = 0; begin < V; begin += kStretch) {
        const int64_t end = std::min(V, begin + kStretch);
        const bool changes = next < seen.count && seen.id[next] < end;
        float most = maxima != nullptr && !changes ? highest_of_chunks<true>(row, begin, end, maxima, nan)
                                                   : highest_from<true>(row, begin, end, nan);
        found.raw = std::max(found.raw, most);
        if (changes) {
            const Changed now = (by.subtracts() ? penalise<true> : penalise<false>)(row, seen, next, end, by, most);
            if (maxima != nullptr)
                most = highest_of_chunks<false>(row, begin, end, maxima, nan);
            else
                most = now.most ? highest_from<false>(row, begin, end, nan) : std::max(most, now.now);
        }
        if (most > found.left) {
            found.left = most;
            found.from = begin;
        }
    }
    if (nan) found.raw = found.left = std::numeric_limits<float>::quiet_NaN();
    return found;
}

}  // namespace

extern "C" {

// The peak of each of R rows and the first place where it stands; NaN where a row holds one.
void tessera_peaks(float* logits, int64_t R, int64_t V, float* peaks, int64_t* places, int64_t threads) {
#pragma omp parallel for num_threads(int(threads)) schedule(dynamic)
    for (int64_t r = 0; r < R; ++r) {
        float* row = logits + r * V;
        const Peaks found = look<1024>(row, V, Seen{}, Penalties{}, nullptr);
        peaks[r] = found.left;
        places[r] = found.place(row, V);
    }
}

// Choose a token of each of R rows: the likeliest where ``temperature`` is 0, else a draw. Before that, divide or multiply by
// ``repetition`` the logits of the ``counts[r]`` tokens that were seen, ``ids[r]``, ascending, and subtract ``presence`` and
// ``times * frequency`` where they were generated; such rows are changed. ``raw_peaks`` are of the rows as they came, ``peaks``
// of what was chosen from; a token is a draw only where both are finite.
void tessera_choose(
    float* logits, int64_t V, int64_t R, const float* repetition, const float* presence, const float* frequency,
    const int64_t* ids, const int64_t* times, const int64_t* counts, const float* temperature, const float* floor,
    const int64_t* top_k, const double* top_p, const double* typical_p, const double* uniform, float* raw_peaks, float* peaks,
    int64_t* tokens, int64_t threads) {
#pragma omp parallel num_threads(int(threads))
    {
        Scratch scratch;
        scratch.maxima.resize(size_t((V + kChunk - 1) / kChunk));
#pragma omp for schedule(dynamic)
        for (int64_t r = 0; r < R; ++r) {
            float* row = logits + r * V;
            const Seen seen{reinterpret_cast<const int32_t*>(ids[r]), reinterpret_cast<const int32_t*>(times[r]), counts[r]};
            const Penalties by{repetition[r], presence[r], frequency[r]};
            const bool draws = temperature[r] > 0.0f, cuts_k = draws && top_k[r] < V;
            const Peaks found = look<8192>(row, V, seen, by, cuts_k ? scratch.maxima.data() : nullptr);
            raw_peaks[r] = found.raw;
            peaks[r] = found.left;
            if (draws && std::isfinite(found.raw) && std::isfinite(found.left)) {
                const Rule rule{temperature[r], floor[r], top_k[r], top_p[r], typical_p[r], uniform[r]};
                tokens[r] = draw(row, V, found.left, rule, scratch);
            } else {
                tokens[r] = found.place(row, V);
            }
        }
    }
}

}  // extern "C"
