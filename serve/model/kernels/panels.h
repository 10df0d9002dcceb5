// What blocked attention multiplies: a panel of query rows by a tile of keys, and the weights that come of it by the tile's values.
//
// Shapes.  R rows of a panel   D head size   A tile is 64 positions, in four parts of 16: of each part the keys are [D, 16] and
// the values [16, D].
//
// How a row's numbers are added up is the same whatever the other rows of its panel are and however many: one sum for each key over
// the features in their order, one for each feature over a tile's keys in theirs.
#pragma once

#include "factors.h"

namespace {

// A tile of keys, for all rows of a work item.
template <typename stored>
struct Tile {
    const stored* keys[kParts];
    const stored* values[kParts];
    int64_t D, width;          // features of a key; of a value, with those that make them whole parts
    const float* key_scales;   // [64] each, or null
    const float* value_scales;
    float scale, softcap;
    bool has_rules;            // whether anything but the scale changes a score
    int value_rows[kParts];    // how many are seen, and to be asked for
    const stored* coming[kParts];  // keys that are read after this tile's values, and to be asked for
};

// Where few rows share what is read, memory is what takes the time: the values come to the cache while the keys are multiplied, the next
// keys while the values are. ``row`` counts kPart numbers, of which a part has as many of keys as of values.
template <typename stored>
inline void ask_for(const stored* part, int64_t row) {
    constexpr int64_t kBytes = kPart * sizeof(stored);
    if (kBytes >= kLineBytes || row * kBytes % kLineBytes == 0) __builtin_prefetch(part + row * kPart);
}

// What each row of a panel sees of a tile: positions [begin, end), neither of which decreases from row to row.
struct Seen {
    int begin[kPanelRows], end[kPanelRows];
    int first_part, end_part;       // those of which a row sees something
    const float* bias[kPanelRows];  // from the tile's first position on, or null
    int bias_positions;             // how many there are from there on
};

struct Panel {
    const void* queries;  // words, [D / kInputs, R]
    float* sums;          // [R, width]
    float* peaks;         // [R]
    float* masses;        // [R, kWidth]: parts of a sum
    float* shrinks;       // [R]: by what the sums shrink before the tile's values are added
    float* scores;        // [R, 64], then weights, which Pairs keep in the first half of each row
};

template <typename Kind, int R, int P, bool looks>
inline void score_parts(const Tile<typename Kind::stored>& tile, int first, const typename Kind::word* queries, float* scores) {
    wide sums[R][P * kVectors] = {};
    for (int64_t d = 0; d < tile.D; d += Kind::kInputs, queries += R) {
        if constexpr (looks)
#pragma GCC unroll 16
            for (int p = 0; p < P; ++p)
                if (d * kPart < tile.value_rows[first + p] * tile.D) ask_for(tile.values[first + p], d);
        typename Kind::factors keys[P * kVectors];
#pragma GCC unroll 16
        for (int p = 0; p < P; ++p)
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) keys[p * kVectors + v] = Kind::keys(tile.keys[first + p] + d * kPart, v);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
            for (int k = 0; k < P * kVectors; ++k) sums[r][k] = Kind::add(sums[r][k], keys[k], queries[r]);
    }
    for (int r = 0; r < R; ++r)
        for (int k = 0; k < P * kVectors; ++k) save_as(sums[r][k], scores + r * kTile + first * kPart + k * kWidth);
}

template <typename Kind, int R, bool looks>
inline void score(const Tile<typename Kind::stored>& tile, const Seen& seen, const typename Kind::word* queries, float* scores) {
    constexpr int P = together(R, kParts);
    int part = seen.first_part;
    for (; part + P <= seen.end_part; part += P) score_parts<Kind, R, P, looks>(tile, part, queries, scores);
    for (; part < seen.end_part; ++part) score_parts<Kind, R, 1, looks>(tile, part, queries, scores);
}

inline wide bias_of(const float* bias, int place, int positions) {
    if (place + kWidth <= positions) return load_wide(bias + place);
    wide out = {};
    for (int i = 0; place + i < positions; ++i) out[i] = bias[place + i];
    return out;
}

// One number of a vector's, by halves, of which ``join`` makes one.
template <int count, typename Join>
inline float folded(const float (&numbers)[count], const Join& join) {
    if constexpr (count == 1) {
        return numbers[0];
    } else {
        typedef float half __attribute__((vector_size(2 * count)));
        float joined[count / 2];
        save_as(join(load_as<half>(numbers), load_as<half>(numbers + count / 2)), joined);
        return folded(joined, join);
    }
}
template <typename Join>
inline float folded(wide x, const Join& join) {
    float numbers[kWidth];
    save_as(x, numbers);
    return folded(numbers, join);
}

// The highest of a vector's numbers, and their sum.
inline float top(wide x) {
#if TESSERA_WIDTH == 16 && defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#else
    return folded(x, [](auto low, auto high) { return low > high ? low : high; });
#endif
}
inline float total(wide x) {
#if TESSERA_WIDTH == 16 && defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)x);
#else
    return folded(x, [](auto low, auto high) { return low + high; });
#endif
}

// Makes one row's scores what the rules say, less a factor that all of them share, and those of unseen keys lower than any; returns the
// highest. One copy for panels of all sizes: the compiler may join a product and a sum in one of several.
template <typename stored>
__attribute__((noinline)) float rule(const Tile<stored>& tile, const Seen& seen, int r, float* scores) {
    iwide lane;
    for (int i = 0; i < kWidth; ++i) lane[i] = i;
    wide most = filled<wide>(kLowest);
    for (int i = seen.first_part * kPart; i < seen.end_part * kPart; i += kWidth) {
        wide x = load_wide(scores + i);
        if (tile.has_rules) {
            x *= tile.scale;
            if (tile.key_scales) x *= load_wide(tile.key_scales + i);
            if (tile.softcap != 0.0f) x = tile.softcap * tanh_of(x * (1.0f / tile.softcap));
            if (seen.bias[r]) x += bias_of(seen.bias[r], i, seen.bias_positions);
        }
        const iwide place = lane + i;
        x = (place >= seen.begin[r]) & (place < seen.end[r]) ? x : filled<wide>(kLowest);
        save_as(x, scores + i);
        most = x > most ? x : most;
    }
    return top(most);
}

// Where the parts of a tile begin and end of which some row of a panel sees something; where those are all, it is known beforehand.
template <bool all>
struct Places {
    const int first, end;
    explicit Places(const Seen& seen) : first(all ? 0 : seen.first_part * kPart), end(all ? kTile : seen.end_part * kPart) {}
};

template <bool all, typename stored>
inline float highest_of(const Tile<stored>& tile, const Seen& seen, int r, float* scores) {
    const Places<all> places(seen);
    if (tile.has_rules || seen.begin[r] > places.first || seen.end[r] < places.end) return rule(tile, seen, r, scores);
    wide most = filled<wide>(kLowest);
#pragma GCC unroll 4
    for (int i = places.first; i < places.end; i += kWidth) {
        const wide x = load_wide(scores + i);
        most = x > most ? x : most;
    }
    return top(most);
}

// Scores become weights.
template <typename Kind, int R, bool all>
inline void weigh(const Tile<typename Kind::stored>& tile, const Seen& seen, const Panel& panel) {
    constexpr bool is_rounded = Kind::kInputs > 1;
    const Places<all> places(seen);
    const float factor = tile.has_rules ? 1.0f : tile.scale;
    float peaks[R], falls[(R + kWidth - 1) / kWidth * kWidth] = {};
    for (int r = 0; r < R; ++r) {
        const float most = highest_of<all>(tile, seen, r, panel.scores + r * kTile) * factor;
        peaks[r] = most > panel.peaks[r] ? most : panel.peaks[r];
        falls[r] = panel.peaks[r] - peaks[r];
        panel.peaks[r] = peaks[r];
    }
    for (int r = 0; r < R; r += kWidth) save_as(quick_exp_nonpositive(load_wide(falls + r)), falls + r);
    for (int r = 0; r < R; ++r) {
        float* row = panel.scores + r * kTile;
        panel.shrinks[r] = falls[r];
        wide mass = {};
        if (seen.begin[r] >= seen.end[r]) {  // then its highest may be one that it does not see
            for (int i = places.first; i < places.end; i += kWidth) Kind::keep(wide{}, row, i);
        } else if (tile.value_scales) {
            for (int i = places.first; i < places.end; i += kWidth) {
                const wide weights = quick_exp_nonpositive<is_rounded>(load_wide(row + i) * factor - peaks[r]);
                mass += weights;
                Kind::keep(weights * load_wide(tile.value_scales + i), row, i);
            }
        } else {
#pragma GCC unroll 4
            for (int i = places.first; i < places.end; i += kWidth) {
                const wide weights = quick_exp_nonpositive<is_rounded>(load_wide(row + i) * factor - peaks[r]);
                mass += weights;
                Kind::keep(weights, row, i);
            }
        }
        save_as(load_wide(panel.masses + r * kWidth) * falls[r] + mass, panel.masses + r * kWidth);
    }
}

template <typename Kind, int R, int C>
__attribute__((always_inline)) inline void add_word(const typename Kind::stored* values, int64_t width, const typename Kind::word* weights,
                                                    wide (&sums)[R][C]) {
    typename Kind::factors rows[C];
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) rows[c] = Kind::values(values + c * kWidth, width);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int c = 0; c < C; ++c) sums[r][c] = Kind::add(sums[r][c], rows[c], weights[r * kTile]);
}

// A copy by registers: numbers whose address nobody else has stay in some.
template <int R, int C>
__attribute__((always_inline)) inline void copy_sums(const wide (&from)[R][C], wide (&to)[R][C]) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int c = 0; c < C; ++c) to[r][c] = from[r][c];
}

// What a panel adds to its sums of a tile, for C registers of features from ``feature`` on.
template <typename Kind, int R, int C>
struct Addend {
    const Tile<typename Kind::stored>& tile;
    const Seen& seen;
    const typename Kind::word* weights;
    int64_t feature;

    const typename Kind::stored* values_at(int key) const { return tile.values[key / kPart] + feature + key % kPart * tile.width; }

    // Keys [from, to), of which some rows do not see some: what they do not see, which may be no number at all, is left out.
    __attribute__((noinline)) void add_seen(int from, int to, wide (&sums)[R][C]) const {
        for (int key = from; key < to; key += Kind::kInputs) {
            const typename Kind::stored* values = values_at(key);
            const int last_key = key + Kind::kInputs - 1;
            typename Kind::factors rows[C];
            for (int c = 0; c < C; ++c) rows[c] = Kind::values(values + c * kWidth, tile.width);
            for (int r = 0; r < R; ++r) {
                const bool first = key >= seen.begin[r] && key < seen.end[r];
                const bool last = last_key >= seen.begin[r] && last_key < seen.end[r];
                if (!first && !last) continue;
                const typename Kind::word weight = weights[r * kTile + key / Kind::kInputs];
                for (int c = 0; c < C; ++c) sums[r][c] = Kind::add(sums[r][c], first && last ? rows[c] : Kind::only(rows[c], last), weight);
            }
        }
    }

    // Keys [from, to), all of which every row sees: the sums stay in registers.
    template <bool looks>
    __attribute__((always_inline)) inline void add_all(int from, int to, wide (&sums)[R][C]) const {
        constexpr int U = C / kVectors, K = Kind::kInputs;
        for (int key = from; key < to;) {
            const int part = key / kPart, base = part * kPart, border = base + kPart < to ? base + kPart : to;
            const typename Kind::stored* values = tile.values[part] + feature;
            for (; key < border; key += K) {
                if constexpr (looks)
#pragma GCC unroll 2
                    for (int k = 0; k < K; ++k)
#pragma GCC unroll 4
                        for (int u = 0; u < U; ++u) ask_for(tile.coming[part], feature + u * kPart + key - base + k);
                add_word<Kind, R, C>(values + (key - base) * tile.width, tile.width, weights + key / K, sums);
            }
        }
    }
};

// Values of the tile times the weights, for 16 U features from ``feature`` on, added to the sums after these have shrunk.
template <typename Kind, int R, int U, bool looks>
inline void add_values(const Tile<typename Kind::stored>& tile, const Seen& seen, const typename Kind::word* weights, int64_t feature,
                       const float* shrinks, float* sums) {
    constexpr int C = U * kVectors, K = Kind::kInputs;
    const Addend<Kind, R, C> addend{tile, seen, weights, feature};
    const int least = seen.begin[0] / K * K, most = seen.end[R - 1];
    // Words of which every row sees every key, if there are any.
    int all_from = (seen.begin[R - 1] + K - 1) / K * K, all_to = seen.end[0] / K * K;
    if (all_from >= all_to) all_from = all_to = most;
    wide parts[R][C] = {};
    if (least < all_from) {
        wide early[R][C] = {};
        addend.add_seen(least, all_from, early);
        copy_sums(early, parts);
    }
    addend.template add_all<looks>(all_from, all_to, parts);
    if (all_to < most) {
        wide late[R][C];
        copy_sums(parts, late);
        addend.add_seen(all_to, most, late);
        copy_sums(late, parts);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int c = 0; c < C; ++c) {
            float* place = sums + r * tile.width + feature + c * kWidth;
            save_as(load_wide(place) * shrinks[r] + parts[r][c], place);
        }
}

// The two halves of a panel's attention to a tile. Each is done for all panels before the other begins, so that the tile's keys stay in
// the first-level cache, then its values.
template <typename Kind, int R, bool looks>
__attribute__((noinline)) void weigh_panel(const Tile<typename Kind::stored>& tile, const Seen& seen, const Panel& panel) {
    score<Kind, R, looks>(tile, seen, static_cast<const typename Kind::word*>(panel.queries), panel.scores);
    if (seen.first_part == 0 && seen.end_part == kParts) weigh<Kind, R, true>(tile, seen, panel);
    else weigh<Kind, R, false>(tile, seen, panel);
}

template <typename Kind, int R, bool looks>
__attribute__((noinline)) void add_panel(const Tile<typename Kind::stored>& tile, const Seen& seen, const Panel& panel) {
    const typename Kind::word* weights = reinterpret_cast<const typename Kind::word*>(panel.scores);
    constexpr int U = together(R, 4);
    int64_t feature = 0;
    for (; feature + U * kPart <= tile.width; feature += U * kPart)
        add_values<Kind, R, U, looks>(tile, seen, weights, feature, panel.shrinks, panel.sums);
    for (; feature < tile.width; feature += kPart) add_values<Kind, R, 1, looks>(tile, seen, weights, feature, panel.shrinks, panel.sums);
}

}  // namespace
