// What a draw chooses from: the candidates of a row of logits, how top-k, top-p and typical-p cut them, and the one that is drawn.
//
// Shapes.  V vocabulary   a row is fp32 [V]
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "vectors.h"
#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {

constexpr int64_t kSorted = 1024;  // candidates that are sorted rather than counted
constexpr int kBins = 2048;
constexpr int64_t kLook = 64;      // candidates that are looked at together for one bin's

// What a register holds: vectors that are longer are taken apart by the compiler, and choices between them number by number.
#ifdef __AVX512F__
constexpr int kRegister = 64;
#else
constexpr int kRegister = 32;
#endif
typedef float fvec __attribute__((vector_size(kRegister)));
typedef int32_t wvec __attribute__((vector_size(kRegister)));
typedef double dvec __attribute__((vector_size(kRegister)));
typedef int64_t lvec __attribute__((vector_size(kRegister)));
typedef float narrow __attribute__((vector_size(kRegister / 2)));
constexpr int kFloats = kRegister / 4, kWide = kRegister / 8;

// The largest of a vector's numbers, by halves.
inline float highest_of(fvec value) {
    float most[kFloats];
    std::memcpy(most, &value, sizeof(most));
    for (int half = kFloats / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) most[i] = most[i + half] > most[i] ? most[i + half] : most[i];
    return most[0];
}

// exp(x) for x <= 0 in double precision, error about 1e-15: 2^n times the series of the remainder.
inline dvec exp_nonpositive(dvec x) {
    const dvec least = dvec{} - 110.0;  // below every fp32
    x = x < least ? least : x;
    const dvec magic = dvec{} + 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to the nearest integer
    const dvec shifted = x * 1.4426950408889634 + magic;
    const dvec n = shifted - magic;
    const dvec r = (x - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
    dvec p = dvec{} + 1.0 / 39916800.0;
    p = p * r + 1.0 / 3628800.0;
    p = p * r + 1.0 / 362880.0;
    p = p * r + 1.0 / 40320.0;
    p = p * r + 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    lvec bits;
    std::memcpy(&bits, &shifted, sizeof(bits));
    bits = (bits + 1023) << 52;
    dvec scale;
    std::memcpy(&scale, &bits, sizeof(scale));
    return p * scale;
}

// What a row's candidates are, in order of their ids: (logit - peak) / temperature and, when asked for, the exponential of it.
struct Candidates {
    std::vector<float> value;
    std::vector<int32_t> id;
    std::vector<float> mass;  // exp(value), rounded from double
    int64_t count = 0;

    void reserve(int64_t most) {
        if (int64_t(value.size()) < most + 2 * kLanes) {
            value.resize(size_t(most + 2 * kLanes));
            id.resize(size_t(most + 2 * kLanes));
            mass.resize(size_t(most + 2 * kLanes));
        }
    }
    void weigh() {
        // Whole vectors: what lies behind the last candidate is scratch.
        for (int64_t i = 0; i < count; i += kWide) {
            const narrow of = load_as<narrow>(&value[size_t(i)]);
            save_as(__builtin_convertvector(exp_nonpositive(__builtin_convertvector(of, dvec)), narrow), &mass[size_t(i)]);
        }
        std::memset(&mass[size_t(count)], 0, kLanes * sizeof(float));
    }
    // The mass of ``kLanes`` candidates from ``i`` on.
    double stretch(int64_t i) const {
        double both[kLanes / 2];  // in one order on all processors
        for (int k = 0; k < kLanes / 2; k += kWide) {
            const narrow low = load_as<narrow>(&mass[size_t(i + k)]), high = load_as<narrow>(&mass[size_t(i + k) + kLanes / 2]);
            const dvec sum = __builtin_convertvector(low, dvec) + __builtin_convertvector(high, dvec);
            std::memcpy(both + k, &sum, sizeof(sum));
        }
        return ((both[0] + both[1]) + (both[2] + both[3])) + ((both[4] + both[5]) + (both[6] + both[7]));
    }
    double total() const {
        double sum = 0.0;
        for (int64_t i = 0; i < count; i += kLanes) sum += stretch(i);
        return sum;
    }
};

struct Entry {
    float value;
    int32_t id;
    float mass;
};
inline bool likelier(const Entry& a, const Entry& b) { return a.value > b.value || (a.value == b.value && a.id < b.id); }

// Drop what is less likely than the last one kept.
void keep_up_to(Candidates& list, const Entry& last) {
    int64_t kept = 0;
    for (int64_t i = 0; i < list.count; ++i) {
        const float value = list.value[size_t(i)];
        const int32_t id = list.id[size_t(i)];
        const bool keeps = value > last.value || (value == last.value && id <= last.id);
        list.value[size_t(kept)] = value;
        list.id[size_t(kept)] = id;
        list.mass[size_t(kept)] = list.mass[size_t(i)];
        kept += keeps;
    }
    list.count = kept;
    std::memset(&list.mass[size_t(kept)], 0, kLanes * sizeof(float));
}

// The same by taking their mass: enough for a draw, and many at a time.
void weigh_up_to(Candidates& list, const Entry& last) {
    const fvec edge = filled<fvec>(last.value);
    const wvec edge_id = wvec{} + last.id;
    for (int64_t i = 0; i < list.count; i += kFloats) {
        const fvec value = load_as<fvec>(&list.value[size_t(i)]);
        wvec id;
        std::memcpy(&id, &list.id[size_t(i)], sizeof(id));
        const wvec keeps = (value > edge) | ((value == edge) & (id <= edge_id));
        wvec mass;
        std::memcpy(&mass, &list.mass[size_t(i)], sizeof(mass));
        mass &= keeps;
        std::memcpy(&list.mass[size_t(i)], &mass, sizeof(mass));
    }
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// By the bits of a mask, the places of those that are set, first ones first.
struct Places {
    alignas(32) int32_t of[256][8] = {};
    constexpr Places() {
        for (int mask = 0; mask < 256; ++mask)
            for (int place = 0, count = 0; place < 8; ++place)
                if (mask >> place & 1) of[mask][count++] = place;
    }
};
constexpr Places kPlaces;
#endif

// Write those of a vector's numbers that reach the bound, and their ids from ``first`` on; returns how many.
inline int pick(fvec x, float bound, int32_t first, float* value, int32_t* id) {
#if defined(__AVX512F__)
    const __m512 wide = (__m512)x;
    const __mmask16 mask = _mm512_cmp_ps_mask(wide, _mm512_set1_ps(bound), _CMP_GE_OQ);
    if (mask == 0) return 0;
    const __m512i ids = _mm512_add_epi32(
        _mm512_set1_epi32(first), _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    _mm512_storeu_ps(value, _mm512_maskz_compress_ps(mask, wide));
    _mm512_storeu_si512(id, _mm512_maskz_compress_epi32(mask, ids));
    return __builtin_popcount(unsigned(mask));
#elif defined(__AVX2__)
    const int mask = _mm256_movemask_ps(_mm256_cmp_ps((__m256)x, _mm256_set1_ps(bound), _CMP_GE_OQ));
    if (mask == 0) return 0;
    const __m256i places = _mm256_load_si256(reinterpret_cast<const __m256i*>(kPlaces.of[mask]));
    _mm256_storeu_ps(value, _mm256_permutevar8x32_ps((__m256)x, places));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(id), _mm256_add_epi32(places, _mm256_set1_epi32(first)));
    return __builtin_popcount(unsigned(mask));
#else
    int count = 0;
    for (int lane = 0; lane < kFloats; ++lane) {
        value[count] = x[lane];
        id[count] = first + lane;
        count += x[lane] >= bound;
    }
    return count;
#endif
}

// Everything that reaches the bound, in order of ids.
void collect(const float* row, int64_t V, float peak, float temperature, float bound, Candidates& list) {
    list.reserve(V);
    bound = bound > std::numeric_limits<float>::lowest() ? bound : std::numeric_limits<float>::lowest();
    int64_t count = 0, i = 0;
    for (; i + kFloats <= V; i += kFloats) {
        const fvec x = (load_as<fvec>(row + i) - peak) / temperature;
        count += pick(x, bound, int32_t(i), &list.value[size_t(count)], &list.id[size_t(count)]);
    }
    for (; i < V; ++i) {
        const float x = (row[i] - peak) / temperature;
        list.value[size_t(count)] = x;
        list.id[size_t(count)] = int32_t(i);
        count += x >= bound;
    }
    list.count = count;
}

struct Scratch {
    Candidates list;
    std::vector<Entry> entries;
    std::vector<float> maxima;
    std::vector<int32_t> bin;
    double bin_mass[kBins];
};

void cut_top_k(Scratch& s, int64_t k) {
    if (s.list.count <= k) return;
    s.entries.resize(size_t(s.list.count));
    for (int64_t i = 0; i < s.list.count; ++i) s.entries[size_t(i)] = {s.list.value[size_t(i)], s.list.id[size_t(i)], 0.0f};
    std::nth_element(s.entries.begin(), s.entries.begin() + (k - 1), s.entries.end(), likelier);
    keep_up_to(s.list, s.entries[size_t(k - 1)]);
}

// The last one of the smallest set of the likeliest whose mass reaches a share of the total: one stays while the mass before it
// is short of that. False where all stay.
bool find_top_p(Scratch& s, double total, double share, Entry& last) {
    const Candidates& list = s.list;
    const int64_t count = list.count;
    int bins = 1;
    if (count > kSorted) {
        fvec low{};
        for (int64_t i = 0; i + kFloats <= count; i += kFloats) {
            const fvec x = load_as<fvec>(&list.value[size_t(i)]);
            low = x < low ? x : low;
        }
        const float least = -highest_of(-low);
        const float scale = least < 0.0f ? float(kBins - 1) / -least : 0.0f;
        const wvec most = wvec{} + (kBins - 1);
        s.bin.resize(size_t(count + kFloats));
        for (int64_t i = 0; i < count; i += kFloats) {
            fvec place = load_as<fvec>(&list.value[size_t(i)]) * -scale;
            place = place < filled<fvec>(float(kBins)) ? place : filled<fvec>(float(kBins));
            wvec bin = __builtin_convertvector(place, wvec);
            bin = bin < most ? bin : most;
            std::memcpy(&s.bin[size_t(i)], &bin, sizeof(bin));
        }
        std::memset(s.bin_mass, 0, sizeof(s.bin_mass));
        for (int64_t i = 0; i < count; ++i) s.bin_mass[s.bin[size_t(i)]] += double(list.mass[size_t(i)]);
        bins = kBins;
    }
    double before = 0.0;
    bool any = false;
    last = {0.0f, -1, 0.0f};
    for (int bin = 0; bin < bins; ++bin) {
        if (bins > 1 && (before + s.bin_mass[bin]) / total < share) {
            any |= s.bin_mass[bin] > 0.0;
            before += s.bin_mass[bin];
            continue;
        }
        s.entries.clear();
        for (int64_t begin = 0; begin < count; begin += kLook) {
            const int64_t end = std::min(count, begin + kLook);
            int32_t none = bins > 1;  // of these candidates: few stretches hold one of the bin
            if (none)
                for (int64_t i = begin; i < end; ++i) none &= s.bin[size_t(i)] != bin;
            if (none) continue;
            for (int64_t i = begin; i < end; ++i)
                if (bins == 1 || s.bin[size_t(i)] == bin)
                    s.entries.push_back({list.value[size_t(i)], list.id[size_t(i)], list.mass[size_t(i)]});
        }
        std::sort(s.entries.begin(), s.entries.end(), likelier);
        for (const Entry& entry : s.entries) {
            if (any && !(before / total < share)) {
                // What lies in earlier bins is likelier than anything in this one.
                if (last.id < 0) last = {std::nextafter(entry.value, 1.0f), std::numeric_limits<int32_t>::max(), 0.0f};
                return true;
            }
            last = entry;
            any = true;
            before += double(entry.mass);
        }
    }
    return false;
}

// Locally typical sampling (Meister et al. 2022): those whose surprise is nearest to the entropy, up to a share of the mass.
void cut_typical(Scratch& s, double share) {
    Candidates& list = s.list;
    const double total = list.total(), log_total = std::log(total);
    double entropy = 0.0;
    for (int64_t i = 0; i < list.count; ++i) {
        const double logprob = double(list.value[size_t(i)]) - log_total;
        entropy -= std::exp(logprob) * logprob;
    }
    std::vector<std::pair<double, int64_t>> order(static_cast<size_t>(list.count));
    for (int64_t i = 0; i < list.count; ++i)
        order[size_t(i)] = {std::fabs(-(double(list.value[size_t(i)]) - log_total) - entropy), i};
    std::sort(order.begin(), order.end(), [&](const auto& a, const auto& b) {
        if (a.first != b.first) return a.first < b.first;
        const float x = list.value[size_t(a.second)], y = list.value[size_t(b.second)];
        return x > y || (x == y && a.second < b.second);
    });
    double before = 0.0;
    size_t kept = 0;
    for (; kept < order.size() && (kept == 0 || before < share); ++kept)
        before += std::exp(double(list.value[size_t(order[kept].second)]) - log_total);
    std::sort(order.begin(), order.begin() + int64_t(kept), [](const auto& a, const auto& b) { return a.second < b.second; });
    for (size_t i = 0; i < kept; ++i) {
        const size_t from = size_t(order[i].second);
        list.value[i] = list.value[from];
        list.id[i] = list.id[from];
        list.mass[i] = list.mass[from];
    }
    list.count = int64_t(kept);
    std::memset(&list.mass[kept], 0, kLanes * sizeof(float));
}

// The candidate at which the mass, in order of ids, passes a share of it all.
int64_t token_at(const Candidates& list, double share) {
    const double target = share * list.total();
    double sum = 0.0;
    int64_t i = 0;
    for (; i < list.count; i += kLanes) {
        const double more = list.stretch(i);
        if (sum + more > target) break;
        sum += more;
    }
    for (; i < list.count; ++i) {
        sum += double(list.mass[size_t(i)]);
        if (sum > target && list.mass[size_t(i)] > 0.0f) return list.id[size_t(i)];
    }
    // u * total may round up to the total: the last one with any mass.
    for (i = list.count - 1; i > 0 && !(list.mass[size_t(i)] > 0.0f);) --i;
    return list.count > 0 ? list.id[size_t(i)] : 0;
}

}  // namespace
