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
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include <omp.h>

#include "parts.h"
#include "vectors.h"

namespace {

struct Step {
    const void* query;
    const void* key;
    const void* value;
    int64_t query_stride_token, query_stride_head;
    int64_t key_stride_token, key_stride_head;
    int64_t value_stride_token, value_stride_head;
    const void* cosines;        // [T, R], contiguous; unused where R is 0
    const void* sines;
    const int64_t* slots;       // [T]: block * S + offset of each token
    void* key_cache;
    void* value_cache;
    bf16* key_scales;           // null where the caches have the type of the queries
    bf16* value_scales;
    void* out;                  // [T, H, D], contiguous
    const float* sinks;         // [H] or null: one more score for each head, without a value
    const float* bias;          // [H, L] or null: added to the score of each head with the key at each position
    const int32_t* tiles;       // [items, 3]: row of its table, first token, number of tokens
    const int32_t* positions;   // [T]
    const int32_t* tables;      // [rows, table_width]
    int64_t tokens, num_tiles, table_width;
    int64_t query_heads, kv_heads, head_dim, block_tokens;
    int64_t rotary_dim;         // R
    int64_t window;             // 0: no window; else position p sees (p - window, p]
    int64_t bias_positions;     // L, whole blocks
    float scale;
    float softcap;              // 0: none; else scores become softcap * tanh(score / softcap)
};

constexpr int kMaxRows = 64;    // query rows of one work item: tile tokens times query heads per key/value head
constexpr int kTilesPerThread = 4;
constexpr float kLowest = -3.0e38f;

// The first R features of one head's query or key after the rotary embedding (Su et al. 2021), as GPT-NeoX and Llama turn them.
template <typename scalar>
inline void rotate(const Step& step, const scalar* head, int64_t token, float* out) {
    const int64_t R = step.rotary_dim, half = R / 2;
    const scalar* cosines = static_cast<const scalar*>(step.cosines) + token * R;
    const scalar* sines = static_cast<const scalar*>(step.sines) + token * R;
    for (int64_t d = 0; d < half; ++d) {
        const float low = to_float(head[d]), high = to_float(head[d + half]);
        out[d] = low * to_float(cosines[d]) - high * to_float(sines[d]);
        out[d + half] = high * to_float(cosines[d + half]) + low * to_float(sines[d + half]);
    }
}

// One query row against one block: positions [begin, end) of the block are seen.
struct Row {
    const float* query;  // [D], scaled
    float* sum;          // [D]
    float* peak;
    float* mass;
    const float* bias;   // [S] of this block, or null
    const float* key_scales;    // [S] of this block each, or null
    const float* value_scales;
    float softcap;
};

// What lies outside [begin, end) may be another sequence's leftovers, NaN included: it is never multiplied.
inline void attend_block(const Row& row, const float* keys, const float* values, int64_t begin, int64_t end, int64_t D, int64_t S,
                         float* scores) {
    for (int64_t s = 0; s < S; ++s) scores[s] = 0.0f;
    for (int64_t d = 0; d < D; ++d)
        for (int64_t s = begin; s < end; ++s) scores[s] += row.query[d] * keys[d * S + s];
    if (row.key_scales)
        for (int64_t s = begin; s < end; ++s) scores[s] *= row.key_scales[s];
    if (row.softcap != 0.0f)
        for (int64_t s = begin; s < end; ++s) scores[s] = row.softcap * std::tanh(scores[s] / row.softcap);
    if (row.bias)
        for (int64_t s = begin; s < end; ++s) scores[s] += row.bias[s];
    float peak = *row.peak;
    for (int64_t s = begin; s < end; ++s) peak = scores[s] > peak ? scores[s] : peak;
    const float shrink = exp_nonpositive(*row.peak - peak);
    *row.peak = peak;
    *row.mass *= shrink;
    for (int64_t d = 0; d < D; ++d) row.sum[d] *= shrink;
    for (int64_t s = begin; s < end; ++s) {
        const float weight = exp_nonpositive(scores[s] - peak);
        *row.mass += weight;
        const float share = row.value_scales ? weight * row.value_scales[s] : weight;
        for (int64_t d = 0; d < D; ++d) row.sum[d] += share * values[s * D + d];
    }
}

// The same for blocks of 16 positions and a head size known when this is compiled.
template <int kD>
inline void attend_block_of_lanes(const Row& row, const float* keys, const float* values, int64_t begin, int64_t end) {
    static_assert(kD % kLanes == 0, "the head size must be whole vectors");
    vec partial[4] = {};
    for (int d = 0; d < kD; d += 4)
        for (int u = 0; u < 4; ++u) partial[u] += row.query[d + u] * load(keys + (d + u) * kLanes);
    vec scores = (partial[0] + partial[1]) + (partial[2] + partial[3]);
    if (row.key_scales) scores *= load(row.key_scales);
    if (row.softcap != 0.0f) scores = row.softcap * tanh_of(scores * (1.0f / row.softcap));
    if (row.bias) scores += load(row.bias);
    const ivec lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const ivec seen = (lane >= int32_t(begin)) & (lane < int32_t(end));
    scores = seen ? scores : all(kLowest);

    const float before = *row.peak, block_peak = highest(scores);
    const float peak = block_peak > before ? block_peak : before;
    const vec weights = exp_nonpositive(scores - peak);
    float weight[kLanes], share[kLanes];
    save(weights, weight);
    save(row.value_scales ? weights * load(row.value_scales) : weights, share);

    vec sum[kD / kLanes];
    const float shrink = block_peak > before ? exp_nonpositive(before - peak) : 1.0f;
    for (int v = 0; v < kD / kLanes; ++v) sum[v] = load(row.sum + v * kLanes) * shrink;
    float mass = *row.mass * shrink;
    for (int64_t s = begin; s < end; ++s) {
        mass += weight[s];
        for (int v = 0; v < kD / kLanes; ++v) sum[v] += share[s] * load(values + s * kD + v * kLanes);
    }
    for (int v = 0; v < kD / kLanes; ++v) save(sum[v], row.sum + v * kLanes);
    *row.mass = mass;
    *row.peak = peak;
}

// Ask for a block's keys and values of one head, into the second-level cache: it can wait for more lines at once than the first.
template <typename stored>
inline void prefetch_block(const Step& step, int64_t block, int64_t head, int64_t numbers) {
    constexpr int64_t line = 64 / int64_t(sizeof(stored));
    const int64_t base = (block * step.kv_heads + head) * numbers;
    const stored* keys = static_cast<const stored*>(step.key_cache) + base;
    const stored* values = static_cast<const stored*>(step.value_cache) + base;
    for (int64_t i = 0; i < numbers; i += line) __builtin_prefetch(keys + i, 0, 2);
    for (int64_t i = 0; i < numbers; i += line) __builtin_prefetch(values + i, 0, 2);
}

// stored: what the caches hold, int8_t or the queries' own type. kD: the head size where it is common and blocks have 16
// positions, else 0.
template <typename scalar, typename stored, int kD>
void attend_item(const Step& step, int64_t item) {
    const int64_t D = kD ? kD : step.head_dim, S = kD ? kLanes : step.block_tokens;
    const int32_t* tile = step.tiles + 3 * (item / step.kv_heads);
    const int64_t head = item % step.kv_heads;
    const int64_t group = step.query_heads / step.kv_heads;
    const int64_t tokens = tile[2], rows = tokens * group;
    const int32_t* table = step.tables + tile[0] * step.table_width;
    const int32_t* positions = step.positions + tile[1];
    constexpr bool kScaled = std::is_same_v<stored, int8_t>;

    thread_local std::vector<float> scratch;
    scratch.resize(size_t(rows * (2 * D + 2) + 3 * S + 2 * D * S));
    float* queries = scratch.data();
    float* sums = queries + rows * D;
    float* peaks = sums + rows * D;
    float* masses = peaks + rows;
    float* scores = masses + rows;
    float* key_scales = scores + S;
    float* value_scales = key_scales + S;
    float* wide_keys = value_scales + S;
    float* wide_values = wide_keys + D * S;

    for (int64_t r = 0; r < rows; ++r) {
        const scalar* source = static_cast<const scalar*>(step.query) + (tile[1] + r / group) * step.query_stride_token +
                               (head * group + r % group) * step.query_stride_head;
        rotate(step, source, tile[1] + r / group, queries + r * D);
        for (int64_t d = step.rotary_dim; d < D; ++d) queries[r * D + d] = to_float(source[d]);
        for (int64_t d = 0; d < D; ++d) queries[r * D + d] *= step.scale;
        for (int64_t d = 0; d < D; ++d) sums[r * D + d] = 0.0f;
        // A sink is a score that was seen already and whose value is zero.
        peaks[r] = step.sinks ? step.sinks[head * group + r % group] : kLowest;
        masses[r] = step.sinks ? 1.0f : 0.0f;
    }

    const int64_t last = positions[tokens - 1];
    const int64_t first = step.window && positions[0] >= step.window ? positions[0] - step.window + 1 : 0;
    for (int64_t b = first / S; b <= last / S; ++b) {
        if (b < last / S)
            prefetch_block<stored>(step, table[b + 1], head, D * S);
        else if (head + 1 < step.kv_heads)
            prefetch_block<stored>(step, table[first / S], head + 1, D * S);
        const int64_t base = (int64_t(table[b]) * step.kv_heads + head) * D * S;
        const float* keys = widen(static_cast<const stored*>(step.key_cache) + base, wide_keys, D * S);
        const float* values = widen(static_cast<const stored*>(step.value_cache) + base, wide_values, D * S);
        if constexpr (kScaled) {
            widen(step.key_scales + base / D, key_scales, S);
            widen(step.value_scales + base / D, value_scales, S);
        }
        for (int64_t r = 0; r < rows; ++r) {
            const int64_t position = positions[r / group];
            const int64_t end = position - b * S + 1 < S ? position - b * S + 1 : S;
            const int64_t low = step.window ? position - step.window + 1 - b * S : 0;
            const int64_t begin = low > 0 ? low : 0;
            if (begin >= end) continue;
            const float* bias = step.bias ? step.bias + (head * group + r % group) * step.bias_positions + b * S : nullptr;
            const Row row = {queries + r * D, sums + r * D, peaks + r, masses + r, bias,
                             kScaled ? key_scales : nullptr, kScaled ? value_scales : nullptr, step.softcap};
            if constexpr (kD > 0)
                attend_block_of_lanes<kD>(row, keys, values, begin, end);
            else
                attend_block(row, keys, values, begin, end, D, S, scores);
        }
    }

    for (int64_t r = 0; r < rows; ++r) {
        scalar* target = static_cast<scalar*>(step.out) +
                         ((tile[1] + r / group) * step.query_heads + head * group + r % group) * D;
        const float inverse = 1.0f / masses[r];
        for (int64_t d = 0; d < D; ++d) from_float(sums[r * D + d] * inverse, target[d]);
    }
}

// Numbers as whole ones between -127 and 127, ``stride`` apart, and their scale, rounded before anything is divided by it. NaN or
// infinity makes the scale NaN, and with it whatever reads the position.
inline bf16 narrow(const float* numbers, int64_t count, int8_t* out, int64_t stride) {
    float most = 0.0f, fault = 0.0f;
    for (int64_t i = 0; i < count; ++i) {
        const float size = std::fabs(numbers[i]);
        most = size > most ? size : most;
        fault += numbers[i] * 0.0f;
    }
    bf16 kept;
    from_float(most / 127.0f + fault, kept);
    const float scale = to_float(kept);
    for (int64_t i = 0; i < count; ++i) {
        const float whole = scale > 0.0f ? std::nearbyint(numbers[i] / scale) : 0.0f;
        out[i * stride] = int8_t(whole > 127.0f ? 127.0f : whole < -127.0f ? -127.0f : whole);
    }
    return kept;
}

// One token's key and value of one head, into their slot.
template <typename scalar, typename stored>
void store_item(const Step& step, int64_t item) {
    const int64_t D = step.head_dim, S = step.block_tokens;
    const int64_t token = item / step.kv_heads, head = item % step.kv_heads;
    const int64_t offset = step.slots[token] % S;
    const int64_t base = (step.slots[token] / S * step.kv_heads + head) * D * S;
    const scalar* key = static_cast<const scalar*>(step.key) + token * step.key_stride_token + head * step.key_stride_head;
    const scalar* value = static_cast<const scalar*>(step.value) + token * step.value_stride_token + head * step.value_stride_head;
    stored* keys = static_cast<stored*>(step.key_cache) + base + offset;
    stored* values = static_cast<stored*>(step.value_cache) + base + offset * D;
    thread_local std::vector<float> turned;
    turned.resize(size_t(D));
    rotate(step, key, token, turned.data());
    if constexpr (std::is_same_v<stored, int8_t>) {
        for (int64_t d = step.rotary_dim; d < D; ++d) turned[size_t(d)] = to_float(key[d]);
        step.key_scales[base / D + offset] = narrow(turned.data(), D, keys, S);
        for (int64_t d = 0; d < D; ++d) turned[size_t(d)] = to_float(value[d]);
        step.value_scales[base / D + offset] = narrow(turned.data(), D, values, 1);
    } else {
        for (int64_t d = 0; d < step.rotary_dim; ++d) from_float(turned[size_t(d)], keys[d * S]);
        for (int64_t d = step.rotary_dim; d < D; ++d) keys[d * S] = key[d];
        std::memcpy(values, value, size_t(D) * sizeof(scalar));
    }
}

// By all threads of the parallel region that it is called in.
template <typename scalar, typename stored, int kD>
void attend_all(const Step& step) {
    const int64_t items = step.num_tiles * step.kv_heads;
    // With tiles enough for all threads, a thread takes all heads of a tile: their parts of a block lie side by side.
    const int64_t chunk = step.num_tiles >= kTilesPerThread * omp_get_num_threads() ? step.kv_heads : 1;
#pragma omp for schedule(static)
    for (int64_t item = 0; item < step.tokens * step.kv_heads; ++item) store_item<scalar, stored>(step, item);
#pragma omp for schedule(dynamic, chunk)
    for (int64_t item = 0; item < items; ++item) attend_item<scalar, stored, kD>(step, item);
}

template <typename scalar, typename stored>
void attend_by(const Step& step) {
    if (step.block_tokens == kLanes) {
        switch (step.head_dim) {
            case 16: return attend_all<scalar, stored, 16>(step);
            case 32: return attend_all<scalar, stored, 32>(step);
            case 64: return attend_all<scalar, stored, 64>(step);
            case 80: return attend_all<scalar, stored, 80>(step);
            case 96: return attend_all<scalar, stored, 96>(step);
            case 128: return attend_all<scalar, stored, 128>(step);
            case 256: return attend_all<scalar, stored, 256>(step);
        }
    }
    attend_all<scalar, stored, 0>(step);
}

}  // namespace

void tessera::attend(const Job& job) {
    const Step& step = *static_cast<const Step*>(job.y);
    if (step.key_scales)
        (job.is_bf16 ? attend_by<bf16, int8_t> : attend_by<float, int8_t>)(step);
    else
        (job.is_bf16 ? attend_by<bf16, bf16> : attend_by<float, float>)(step);
}

extern "C" {

int tessera_kernel_version() { return 10; }
int tessera_max_rows() { return kMaxRows; }

void tessera_attend(int is_bf16, int threads, const Step* step) {
    tessera::Job job = {};
    job.is_bf16 = is_bf16, job.y = step;
#pragma omp parallel num_threads(threads)
    tessera::attend(job);
}
}
