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

#include <algorithm>
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
constexpr int kSharesPerThread = 2;

// Keys of a head from position ``base`` on, of the sequence that a tile belongs to; of a tile below 0 there are none.
struct Place {
    int64_t tile, head, base;
};

// A tile of consecutive tokens of one sequence, and one key/value head. Its memory is given to it.
template <typename Kind, typename scalar>
class Item {
    typedef typename Kind::stored stored;
    typedef typename Kind::word word;
    static constexpr bool kScaled = std::is_same_v<stored, int8_t>;

public:
    Item(const Step& given, int64_t tile, int64_t own_head)
        : step(given), D(given.head_dim), S(given.block_tokens), width((D + kPart - 1) / kPart * kPart), head(own_head),
          group(given.query_heads / given.kv_heads), first_token(given.tiles[3 * tile + 1]), rows(given.tiles[3 * tile + 2] * group),
          panels((rows + kPanelRows - 1) / kPanelRows), table(table_of(tile)), positions(given.positions + first_token),
          first(first_seen(step, positions[0])), last(positions[rows / group - 1]), in_tiles(lies_in_tiles(given)) {}

    // Whether the cache's blocks are a tile's parts.
    static bool lies_in_tiles(const Step& step) { return step.block_tokens == kPart && step.head_dim % kPart == 0; }

    int64_t num_panels() const { return panels; }
    int64_t last_position() const { return last; }
    static int64_t first_base(const Step& step, int64_t tile) {
        return first_seen(step, step.positions[step.tiles[3 * tile + 1]]) / kTile * kTile;
    }

    // Numbers of memory, in whole lines.
    int64_t numbers() const {
        const int64_t copies = in_tiles ? 0 : kTile * (D + width);
        return (rows * (D + width + 2 + kWidth + kTile) + D + 2 * kTile + copies + kPart - 1) / kPart * kPart;
    }

    void begin(float* memory, Seen* own_seen) {
        take(memory, own_seen);
        for (int64_t p = 0; p < panels; ++p) begin_panel(p);
    }

    // What is from ``base`` on. Meanwhile the keys of ``then`` are asked for.
    void pass(int64_t base, Place then) {
        Tile<stored> tile{};
        tile.D = D, tile.width = width, tile.scale = step.scale, tile.softcap = step.softcap;
        tile.has_rules = kScaled || step.softcap != 0.0f || step.bias || !(step.scale > 0.0f);
        find_tile(base, first > base ? first : base, last < base + kTile ? last : base + kTile - 1, tile);
        if (in_tiles) find_coming(base, then, tile);
        for (int64_t p = 0; p < panels; ++p) {
            look(p, base, seen[p]);
            if (seen[p].end_part > seen[p].first_part) weigh_panel_of<kPanelRows>(rows_of(p), looks(p), tile, seen[p], panel_at(p));
        }
        for (int64_t p = 0; p < panels; ++p)
            if (seen[p].end_part > seen[p].first_part) add_panel_of<kPanelRows>(rows_of(p), looks(p), tile, seen[p], panel_at(p));
    }

    void end() const {
        for (int64_t r = 0; r < rows; ++r) finish(r);
    }

private:
    const Step& step;
    const int64_t D, S, width, head, group, first_token, rows, panels;
    const int32_t* table;
    const int32_t* positions;
    const int64_t first, last;  // positions that its rows see
    const bool in_tiles;
    word* queries;
    float *sums, *peaks, *masses, *shrinks, *scores, *scales, *turned;
    Seen* seen;
    stored *own_keys, *own_values;

    const int32_t* table_of(int64_t tile) const { return step.tables + step.tiles[3 * tile] * step.table_width; }
    static int64_t first_seen(const Step& step, int64_t position) {
        return step.window && position >= step.window ? position - step.window + 1 : 0;
    }
    bool looks(int64_t panel) const { return panel == 0 && in_tiles; }  // the first of those that read the same
    int64_t first_row(int64_t panel) const { return panel * rows / panels; }
    int rows_of(int64_t panel) const { return int(first_row(panel + 1) - first_row(panel)); }
    const stored* keys_at(int32_t block, int64_t of_head) const {
        return static_cast<const stored*>(step.key_cache) + (int64_t(block) * step.kv_heads + of_head) * D * S;
    }
    const stored* keys_of(int64_t block) const { return keys_at(table[block], head); }
    const stored* values_of(int64_t block) const {
        return static_cast<const stored*>(step.value_cache) + (int64_t(table[block]) * step.kv_heads + head) * D * S;
    }

    void take(float* free, Seen* own_seen) {
        seen = own_seen;
        const auto take = [&](int64_t numbers) { return (free += numbers) - numbers; };
        sums = take(rows * width), scores = take(rows * kTile), scales = take(2 * kTile), masses = take(rows * kWidth);
        peaks = take(rows), shrinks = take(rows), turned = take(D);
        queries = reinterpret_cast<word*>(take(rows * D));
        if (!in_tiles) {
            own_keys = reinterpret_cast<stored*>(take(kTile * D));
            own_values = reinterpret_cast<stored*>(take(kTile * width));
            std::memset(static_cast<void*>(own_values), 0, size_t(kTile * width) * sizeof(stored));
        }
    }

    void begin_panel(int64_t panel) {
        const int64_t begin = first_row(panel), count = first_row(panel + 1) - begin, features = D, rotated = step.rotary_dim;
        const int64_t words = features / Kind::kInputs, turned_words = rotated / Kind::kInputs;
        for (int64_t r = begin; r < begin + count; ++r) {
            const int64_t token = first_token + r / group, own = head * group + r % group;
            const scalar* source = query_of(r);
            if (r + count < rows) ask_for_head(query_of(r + count), features);
            rotate(step, source, token, turned);
            Kind::narrow(turned, int(rotated));
            const word* own_turned = reinterpret_cast<const word*>(turned);
            word* target = queries + begin * words + r - begin;
            int64_t w = 0;
            for (; w < turned_words; ++w) target[w * count] = own_turned[w];
            for (; w < words; ++w) target[w * count] = Kind::word_at(source + w * Kind::kInputs);
            // A sink is a score that was seen already and whose value is zero.
            peaks[r] = step.sinks ? step.sinks[own] : kLowest;
            std::fill_n(masses + r * kWidth, kWidth, 0.0f);
            masses[r * kWidth] = step.sinks ? 1.0f : 0.0f;
        }
        std::fill_n(sums + begin * width, count * width, 0.0f);
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
        if (in_tiles) {
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
        // By names of its own: what a member is might change with every number that is stored.
        const int64_t features = D, apart = S, whole = width;
        stored *const key_copies = own_keys, *const value_copies = own_values;
        for (int64_t position = from; position <= to; ++position) {
            const int64_t place = position - base;
            const stored* key = keys_of(position / apart) + position % apart;
            stored* own = key_copies + place / kPart * kPart * features + place % kPart;
            for (int64_t d = 0; d < features; ++d) own[d * kPart] = key[d * apart];
            const stored* value = values_of(position / apart) + position % apart * features;
            std::memcpy(value_copies + place * whole, value, size_t(features) * sizeof(stored));
        }
    }

    // What is read while this tile's keys are multiplied, and while its values are: those, and the keys of ``then``.
    void find_coming(int64_t base, Place then, Tile<stored>& tile) const {
        const int32_t* blocks = nullptr;
        int64_t count = 0;
        if (then.tile >= 0) {
            const int32_t* tokens = step.tiles + 3 * then.tile;
            blocks = table_of(then.tile) + then.base / kPart;
            count = (step.positions[tokens[1] + tokens[2] - 1] - then.base) / kPart + 1;
        }
        for (int part = 0; part < kParts; ++part) {
            const int64_t seen_of = last + 1 - base - part * kPart;
            tile.value_rows[part] = seen_of < 0 ? 0 : seen_of < kPart ? int(seen_of) : kPart;
            // Where nothing comes: what is there already.
            tile.coming[part] = part < count ? keys_at(blocks[part], then.head) : tile.values[part];
        }
    }

    // What the panel's rows see of the tile from ``base`` on.
    void look(int64_t panel, int64_t base, Seen& seen) const {
        const int64_t begin = first_row(panel);
        const int count = rows_of(panel);
        const int64_t bias_from = head * group * step.bias_positions + base;
        for (int64_t r = 0, token = begin / group, of_token = begin % group; r < count; ++r) {
            const int64_t position = positions[token], low = first_seen(step, position) - base, high = position + 1 - base;
            seen.begin[r] = int(std::min(std::max(low, int64_t(0)), int64_t(kTile)));
            seen.end[r] = int(std::min(std::max(high, int64_t(0)), int64_t(kTile)));
            seen.bias[r] = step.bias ? step.bias + of_token * step.bias_positions + bias_from : nullptr;
            if (++of_token == group) ++token, of_token = 0;
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
        scalar* target = static_cast<scalar*>(step.out);
        target += ((first_token + r / group) * step.query_heads + head * group + r % group) * D;
        float* own = sums + r * width;
        const float inverse = 1.0f / total(load_wide(masses + r * kWidth));
        for (int64_t d = 0; d < width; d += kWidth) save_as(load_wide(own + d) * inverse, own + d);
        round_to(own, D, target);
    }
};

// A thread's memory for items.
struct Room {
    std::vector<float> memory;
    std::vector<Seen> seen;

    // The first of so many numbers, which begins with a line.
    float* numbers(int64_t count) {
        memory.resize(size_t(count + kPart));
        return memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64 / sizeof(float);
    }
};

template <typename Kind, typename scalar>
void attend_head(const Step& step, int64_t tile, int64_t head, Place then) {
    typedef Item<Kind, scalar> One;
    thread_local Room room;
    One one(step, tile, head);
    room.seen.resize(size_t(one.num_panels()));
    one.begin(room.numbers(one.numbers()), room.seen.data());
    const int64_t last = one.last_position();
    for (int64_t base = One::first_base(step, tile); base <= last; base += kTile)
        one.pass(base, base + kTile <= last ? Place{tile, head, base + kTile} : then);
    one.end();
}

// Heads [from, to) of a tile side by side: of each block their keys lie one behind the other, and their values.
template <typename Kind, typename scalar>
void attend_heads(const Step& step, int64_t tile, int64_t from, int64_t to, Place then) {
    typedef Item<Kind, scalar> One;
    thread_local Room room;
    thread_local std::vector<One> items;
    items.clear();
    for (int64_t head = from; head < to; ++head) items.emplace_back(step, tile, head);
    const int64_t numbers = items[0].numbers(), panels = items[0].num_panels(), last = items[0].last_position();
    room.seen.resize(size_t((to - from) * panels));
    float* memory = room.numbers((to - from) * numbers);
    for (int64_t i = 0; i < to - from; ++i) items[size_t(i)].begin(memory + i * numbers, room.seen.data() + i * panels);
    for (int64_t base = One::first_base(step, tile); base <= last; base += kTile)
        for (int64_t head = from; head < to; ++head) {
            Place next = then;
            if (head + 1 < to) next = {tile, head + 1, base};
            else if (base + kTile <= last) next = {tile, from, base + kTile};
            items[size_t(head - from)].pass(base, next);
        }
    for (const One& item : items) item.end();
}

// By all threads of the parallel region that it is called in.
template <typename Kind, typename scalar>
void attend_all(const Step& step) {
    const int64_t tiles = step.num_tiles, heads = step.kv_heads, threads = omp_get_num_threads();
    const int64_t runs = (step.tokens + kPart - 1) / kPart;
#pragma omp for schedule(static)
    for (int64_t item = 0; item < runs * heads; ++item) {
        // Tokens that follow one another share lines of their block's keys.
        const int64_t first = item / heads * kPart, end = first + kPart < step.tokens ? first + kPart : step.tokens;
        store_run<scalar, typename Kind::stored>(step, first, end, item % heads);
    }
    // With tiles enough for all threads, a thread takes all heads of a tile; of few single tokens some of them.
    int64_t shares = heads;
    if (tiles >= kTilesPerThread * threads) shares = 1;
    else if (tiles == step.tokens && tiles > 0) shares = std::min(heads, (kSharesPerThread * threads + tiles - 1) / tiles);
    const auto place = [&](int64_t item) {  // where an item begins; what is behind the last is nowhere
        if (item >= tiles * shares) return Place{-1, 0, 0};
        const int64_t tile = tiles - 1 - item / shares;  // from the last on: a prompt's see the most, and what comes last should be short
        return Place{tile, item % shares * heads / shares, Item<Kind, scalar>::first_base(step, tile)};
    };
#pragma omp for schedule(dynamic)
    for (int64_t item = 0; item < tiles * shares; ++item) {
        const Place own = place(item), then = place(item + 1);
        const int64_t end = (item % shares + 1) * heads / shares;
        // The rows of many tokens, and copies of blocks that are no tile's parts, would drive one another out of the cache.
        if (step.tiles[3 * own.tile + 2] == 1 && Item<Kind, scalar>::lies_in_tiles(step)) {
            attend_heads<Kind, scalar>(step, own.tile, own.head, end, then);
            continue;
        }
        for (int64_t head = own.head; head < end; ++head)
            attend_head<Kind, scalar>(step, own.tile, head, head + 1 < end ? Place{own.tile, head + 1, own.base} : then);
    }
}

}  // namespace
