// Paged attention on the CPU: the step's keys and values are rotated and written to their blocks, then one pass over the blocks
// of each sequence, nothing gathered or copied.
//
// Shapes.  T tokens of the step   H query heads   G key/value heads   D head size   B blocks   S positions per block
//   queries [T, H, D], keys and values of the step [T, G, D] (any strides over T and heads, D contiguous)
//   key cache [B, G, D, S] (transposed inside a block, so that one vector holds S positions), value cache [B, G, S, D]
//   their scales [B, G, S] in bf16, where they are whole numbers of 8 bits: a number stands for itself times its position's scale
//   R features of a head that the rotary embedding turns, the first ones; R / 2 apart lie the two that are turned together
//
// A work item is a tile of consecutive tokens of one sequence and one key/value head: its query rows share every block
// that is read. Softmax is computed online (Milakov and Gimelshein 2018), in fp32 whatever the storage type.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include <omp.h>

#include "panels.h"
#include "parts.h"
#include "storing.h"

namespace {

constexpr int kMaxRows = 96;    // query rows of one work item: tile tokens times query heads per key/value head
constexpr int kTilesPerThread = 4;

// A tile of consecutive tokens of one sequence, and one key/value head.
template <typename Kind, typename scalar>
class Item {
    typedef typename Kind::stored stored;
    typedef typename Kind::word word;
    static constexpr bool kScaled = std::is_same_v<stored, int8_t>;

public:
    // ``next`` is computed after it, by this thread as a rule.
    struct Place {
        int64_t tile, head;
    };
    Item(const Step& given, Place own, Place then)
        : step(given), next(then), D(given.head_dim), S(given.block_tokens), width((D + kPart - 1) / kPart * kPart), head(own.head),
          group(given.query_heads / given.kv_heads), first_token(given.tiles[3 * own.tile + 1]),
          rows(given.tiles[3 * own.tile + 2] * group), panels((rows + kPanelRows - 1) / kPanelRows), table(table_of(own.tile)),
          positions(given.positions + first_token), lies_in_tiles(S == kPart && D % kPart == 0) {}

    void attend() {
        take_scratch();
        for (int64_t p = 0; p < panels; ++p) begin_panel(p);
        const int64_t last = positions[rows / group - 1], first = first_seen(positions[0]);
        Tile<stored> tile{};
        tile.D = D, tile.width = width, tile.scale = step.scale, tile.softcap = step.softcap;
        tile.has_rules = kScaled || step.softcap != 0.0f || step.bias || !(step.scale > 0.0f);
        for (int64_t base = first / kTile * kTile; base <= last; base += kTile) {
            find_tile(base, first > base ? first : base, last < base + kTile ? last : base + kTile - 1, tile);
            if (lies_in_tiles) find_coming(base, last, tile);
            for (int64_t p = 0; p < panels; ++p) {
                look(p, base, seen[p]);
                if (seen[p].end_part > seen[p].first_part) weigh_panel_of<kPanelRows>(rows_of(p), looks(p), tile, seen[p], panel_at(p));
            }
            for (int64_t p = 0; p < panels; ++p)
                if (seen[p].end_part > seen[p].first_part) add_panel_of<kPanelRows>(rows_of(p), looks(p), tile, seen[p], panel_at(p));
        }
        for (int64_t r = 0; r < rows; ++r) finish(r);
    }

private:
    const Step& step;
    const Place next;
    const int64_t D, S, width, head, group, first_token, rows, panels;
    const int32_t* table;
    const int32_t* positions;
    const bool lies_in_tiles;  // then the cache's blocks are a tile's parts
    word* queries;
    float *sums, *peaks, *masses, *shrinks, *scores, *scales, *turned;
    Seen* seen;
    stored *own_keys, *own_values;

    const int32_t* table_of(int64_t tile) const { return step.tables + step.tiles[3 * tile] * step.table_width; }
    int64_t first_seen(int64_t position) const { return step.window && position >= step.window ? position - step.window + 1 : 0; }
    bool looks(int64_t panel) const { return panel == 0 && lies_in_tiles; }  // the first of those that read the same
    int64_t first_row(int64_t panel) const { return panel * rows / panels; }
    int rows_of(int64_t panel) const { return int(first_row(panel + 1) - first_row(panel)); }
    const stored* keys_at(int32_t block, int64_t of_head) const {
        return static_cast<const stored*>(step.key_cache) + (int64_t(block) * step.kv_heads + of_head) * D * S;
    }
    const stored* keys_of(int64_t block) const { return keys_at(table[block], head); }
    const stored* values_of(int64_t block) const {
        return static_cast<const stored*>(step.value_cache) + (int64_t(table[block]) * step.kv_heads + head) * D * S;
    }

    void take_scratch() {
        thread_local std::vector<Seen> own_seen;
        own_seen.resize(size_t(panels));
        seen = own_seen.data();
        thread_local std::vector<float> scratch;
        scratch.resize(size_t(rows * (D + width + 2 + kWidth + kTile) + D + 2 * kTile + (lies_in_tiles ? 0 : kTile * (D + width)) + 16));
        float* free = scratch.data() + (64 - reinterpret_cast<uintptr_t>(scratch.data()) % 64) % 64 / sizeof(float);
        const auto take = [&](int64_t numbers) { return (free += numbers) - numbers; };
        sums = take(rows * width), scores = take(rows * kTile), scales = take(2 * kTile), masses = take(rows * kWidth);
        peaks = take(rows), shrinks = take(rows), turned = take(D);
        queries = reinterpret_cast<word*>(take(rows * D));
        if (!lies_in_tiles) {
            own_keys = reinterpret_cast<stored*>(take(kTile * D));
            own_values = reinterpret_cast<stored*>(take(kTile * width));
            std::memset(static_cast<void*>(own_values), 0, size_t(kTile * width) * sizeof(stored));
        }
    }

    void begin_panel(int64_t panel) {
        const int64_t begin = first_row(panel), count = first_row(panel + 1) - begin;
        for (int64_t r = begin; r < begin + count; ++r) {
            const int64_t token = first_token + r / group, own = head * group + r % group;
            const scalar* source = query_of(r);
            if (r + count < rows) ask_for_head(query_of(r + count), D);
            rotate(step, source, token, turned);
            word* target = queries + begin * (D / Kind::kInputs) + r - begin;
            int64_t d = 0;
            for (; d < step.rotary_dim; d += Kind::kInputs) target[d / Kind::kInputs * count] = Kind::word_of(turned + d);
            for (; d < D; d += Kind::kInputs) target[d / Kind::kInputs * count] = Kind::word_at(source + d);
            // A sink is a score that was seen already and whose value is zero.
            peaks[r] = step.sinks ? step.sinks[own] : kLowest;
            for (int i = 0; i < kWidth; ++i) masses[r * kWidth + i] = 0.0f;
            masses[r * kWidth] = step.sinks ? 1.0f : 0.0f;
        }
        for (int64_t i = begin * width; i < (begin + count) * width; ++i) sums[i] = 0.0f;
    }

    const scalar* query_of(int64_t row) const {
        const int64_t token = first_token + row / group, own = head * group + row % group;
        return static_cast<const scalar*>(step.query) + token * step.query_stride_token + own * step.query_stride_head;
    }

    // Where keys and values of positions [from, to] of the tile lie.
    void find_tile(int64_t base, int64_t from, int64_t to, Tile<stored>& tile) {
        if (kScaled) {
            tile.key_scales = scales, tile.value_scales = scales + kTile;
            for (int64_t position = from; position <= to; ++position) {
                const int64_t place = (int64_t(table[position / S]) * step.kv_heads + head) * S + position % S;
                scales[position - base] = to_float(step.key_scales[place]);
                scales[kTile + position - base] = to_float(step.value_scales[place]);
            }
        }
        if (lies_in_tiles) {
            for (int64_t block = from / S; block <= to / S; ++block) {
                tile.keys[block - base / S] = keys_of(block);
                tile.values[block - base / S] = values_of(block);
            }
            return;
        }
        for (int part = 0; part < kParts; ++part) {
            tile.keys[part] = own_keys + part * kPart * D;
            tile.values[part] = own_values + part * kPart * width;
        }
        for (int64_t position = from; position <= to; ++position) {
            const int64_t place = position - base;
            const stored* key = keys_of(position / S) + position % S;
            stored* own = own_keys + place / kPart * kPart * D + place % kPart;
            for (int64_t d = 0; d < D; ++d) own[d * kPart] = key[d * S];
            std::memcpy(own_values + place * width, values_of(position / S) + position % S * D, size_t(D) * sizeof(stored));
        }
    }

    // What is read while this tile's keys are multiplied, and while its values are: those, and the next keys.
    void find_coming(int64_t base, int64_t last, Tile<stored>& tile) const {
        const bool is_last = base + kTile > last;
        const int32_t* blocks = table + (base + kTile) / kPart;
        int64_t count = (last - base - kTile) / kPart + 1, of_head = head;
        if (is_last && next.tile < 0) {
            count = 0;
        } else if (is_last) {
            const int32_t* then = step.tiles + 3 * next.tile;
            const int64_t begin = first_seen(step.positions[then[1]]) / kTile * kTile, end = step.positions[then[1] + then[2] - 1];
            blocks = table_of(next.tile) + begin / kPart, count = (end - begin) / kPart + 1, of_head = next.head;
        }
        for (int part = 0; part < kParts; ++part) {
            const int64_t seen_of = last + 1 - base - part * kPart;
            tile.value_rows[part] = seen_of < 0 ? 0 : seen_of < kPart ? int(seen_of) : kPart;
            // Where nothing comes: what is there already.
            tile.coming[part] = part < count ? keys_at(blocks[part], of_head) : tile.values[part];
        }
    }

    // What the panel's rows see of the tile from ``base`` on.
    void look(int64_t panel, int64_t base, Seen& seen) const {
        const int64_t begin = first_row(panel);
        const int count = rows_of(panel);
        for (int r = 0; r < count; ++r) {
            const int64_t position = positions[(begin + r) / group], own = head * group + (begin + r) % group;
            const int64_t low = first_seen(position) - base, high = position + 1 - base;
            seen.begin[r] = low < 0 ? 0 : low > kTile ? kTile : int(low);
            seen.end[r] = high < 0 ? 0 : high > kTile ? kTile : int(high);
            seen.bias[r] = step.bias ? step.bias + own * step.bias_positions + base : nullptr;
        }
        const bool any = seen.begin[0] < seen.end[count - 1];
        seen.first_part = any ? seen.begin[0] / kPart : 0;
        seen.end_part = any ? (seen.end[count - 1] + kPart - 1) / kPart : 0;
        seen.bias_positions = int(step.bias_positions - base < kTile ? step.bias_positions - base : kTile);
    }

    Panel panel_at(int64_t panel) const {
        const int64_t begin = first_row(panel);
        return {queries + begin * (D / Kind::kInputs), sums + begin * width, peaks + begin, masses + begin * kWidth, shrinks + begin,
                scores + begin * kTile};
    }

    template <int R>
    static void weigh_panel_of(int count, bool looks, const Tile<stored>& tile, const Seen& seen, const Panel& panel) {
        if constexpr (R > 1)
            if (count < R) return weigh_panel_of<R - 1>(count, looks, tile, seen, panel);
        looks ? weigh_panel<Kind, R, true>(tile, seen, panel) : weigh_panel<Kind, R, false>(tile, seen, panel);
    }

    template <int R>
    static void add_panel_of(int count, bool looks, const Tile<stored>& tile, const Seen& seen, const Panel& panel) {
        if constexpr (R > 1)
            if (count < R) return add_panel_of<R - 1>(count, looks, tile, seen, panel);
        looks ? add_panel<Kind, R, true>(tile, seen, panel) : add_panel<Kind, R, false>(tile, seen, panel);
    }

    void finish(int64_t r) const {
        scalar* target = static_cast<scalar*>(step.out) + ((first_token + r / group) * step.query_heads + head * group + r % group) * D;
        float mass = 0.0f;
        for (int i = 0; i < kWidth; ++i) mass += masses[r * kWidth + i];
        const float inverse = 1.0f / mass;
        for (int64_t d = 0; d < D; ++d) from_float(sums[r * width + d] * inverse, target[d]);
    }
};

// By all threads of the parallel region that it is called in.
template <typename Kind, typename scalar>
void attend_all(const Step& step) {
    const int64_t items = step.num_tiles * step.kv_heads;
    // With tiles enough for all threads, a thread takes all heads of a tile: their parts of a block lie side by side.
    const int64_t chunk = step.num_tiles >= kTilesPerThread * omp_get_num_threads() ? step.kv_heads : 1;
    const int64_t runs = (step.tokens + kPart - 1) / kPart;
#pragma omp for schedule(static)
    for (int64_t item = 0; item < runs * step.kv_heads; ++item) {
        // Tokens that follow one another share lines of their block's keys.
        const int64_t first = item / step.kv_heads * kPart, end = first + kPart < step.tokens ? first + kPart : step.tokens;
        store_run<scalar, typename Kind::stored>(step, first, end, item % step.kv_heads);
    }
// From the last on: a prompt's last tiles see the most, and what comes last should be short.
#pragma omp for schedule(dynamic, chunk)
    for (int64_t item = 0; item < items; ++item) {
        typedef typename Item<Kind, scalar>::Place Place;
        const auto place = [&](int64_t at) { return Place{step.num_tiles - 1 - at / step.kv_heads, at % step.kv_heads}; };
        Item<Kind, scalar>(step, place(item), place(item + 1)).attend();
    }
}

}  // namespace
