// Paged attention on the CPU: one pass over the KV blocks of each sequence, nothing gathered or copied.
//
// Shapes.  T tokens of the step   H query heads   G key/value heads   D head size   B blocks   S positions per block
//   queries [T, H, D], keys and values of the step [T, G, D] (any strides over T and heads, D contiguous)
//   key cache [B, G, D, S] (transposed inside a block, so that one vector holds S positions), value cache [B, G, S, D]
//
// A work item is a tile of consecutive tokens of one sequence and one key/value head: its query rows share every block
// that is read. Softmax is computed online (Milakov and Gimelshein 2018), in fp32 whatever the storage type.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

struct bf16 {
    uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
    uint32_t wide = uint32_t(x.bits) << 16;
    float out;
    std::memcpy(&out, &wide, 4);
    return out;
}
// A block's numbers as fp32: in place for fp32, widened into scratch for bf16. A loop of its own, so that it becomes vector code.
inline const float* widen(const float* source, float*, int64_t) { return source; }
inline const float* widen(const bf16* source, float* scratch, int64_t count) {
    uint32_t* wide = reinterpret_cast<uint32_t*>(scratch);
    for (int64_t i = 0; i < count; ++i) wide[i] = uint32_t(source[i].bits) << 16;
    return scratch;
}
inline void from_float(float x, float& out) { out = x; }
inline void from_float(float x, bf16& out) {
    uint32_t wide;
    std::memcpy(&wide, &x, 4);
    // Round to nearest even; a NaN stays one.
    out.bits = std::isnan(x) ? uint16_t(0x7fc0) : uint16_t((wide + 0x7fffu + ((wide >> 16) & 1u)) >> 16);
}

// Sixteen floats at once; the compiler maps them to whatever vectors the processor has.
constexpr int kLanes = 16;
typedef float vec __attribute__((vector_size(64)));
typedef int32_t ivec __attribute__((vector_size(64)));

inline vec load(const float* source) {
    vec out;
    std::memcpy(&out, source, sizeof(out));
    return out;
}
inline void save(vec value, float* target) { std::memcpy(target, &value, sizeof(value)); }
inline vec all(float x) { return vec{} + x; }
inline float highest(vec value) {
    float peak = value[0];
    for (int i = 1; i < kLanes; ++i) peak = value[i] > peak ? value[i] : peak;
    return peak;
}

// exp(x) for x <= 0, relative error about 2e-7: 2^n times a polynomial of the remainder (Cephes' coefficients).
inline vec exp_nonpositive(vec x) {
    x = x < all(-87.0f) ? all(-87.0f) : x;
    const vec magic = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to the nearest integer
    const vec n = (x * 1.44269504088896341f + magic) - magic;
    const vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const ivec bits = (__builtin_convertvector(n, ivec) + 127) << 23;
    vec scale;
    std::memcpy(&scale, &bits, sizeof(scale));
    return p * scale;
}
inline float exp_nonpositive(float x) { return exp_nonpositive(all(x))[0]; }

struct Step {
    const void* query;
    int64_t query_stride_token, query_stride_head;
    const void* key_cache;
    const void* value_cache;
    void* out;                  // [T, H, D], contiguous
    const int32_t* tiles;       // [items, 3]: sequence, first token, number of tokens
    const int32_t* positions;   // [T]
    const int32_t* tables;      // [Q, table_width]
    int64_t num_tiles, table_width;
    int64_t query_heads, kv_heads, head_dim, block_tokens;
    int64_t window;             // 0: no window; else position p sees (p - window, p]
    float scale;
};

constexpr int kMaxRows = 64;    // query rows of one work item: tile tokens times query heads per key/value head
constexpr float kLowest = -3.0e38f;

// One query row against one block: positions [begin, end) of the block are seen.
struct Row {
    const float* query;  // [D], scaled
    float* sum;          // [D]
    float* peak;
    float* mass;
};

// What lies outside [begin, end) may be another sequence's leftovers, NaN included: it is never multiplied.
inline void attend_block(const Row& row, const float* keys, const float* values, int64_t begin, int64_t end, int64_t D, int64_t S,
                         float* scores) {
    for (int64_t s = 0; s < S; ++s) scores[s] = 0.0f;
    for (int64_t d = 0; d < D; ++d)
        for (int64_t s = begin; s < end; ++s) scores[s] += row.query[d] * keys[d * S + s];
    float peak = *row.peak;
    for (int64_t s = begin; s < end; ++s) peak = scores[s] > peak ? scores[s] : peak;
    const float shrink = exp_nonpositive(*row.peak - peak);
    *row.peak = peak;
    *row.mass *= shrink;
    for (int64_t d = 0; d < D; ++d) row.sum[d] *= shrink;
    for (int64_t s = begin; s < end; ++s) {
        const float weight = exp_nonpositive(scores[s] - peak);
        *row.mass += weight;
        for (int64_t d = 0; d < D; ++d) row.sum[d] += weight * values[s * D + d];
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
    const ivec lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const ivec seen = (lane >= int32_t(begin)) & (lane < int32_t(end));
    scores = seen ? scores : all(kLowest);

    const float before = *row.peak, block_peak = highest(scores);
    const float peak = block_peak > before ? block_peak : before;
    const vec weights = exp_nonpositive(scores - peak);
    float weight[kLanes];
    save(weights, weight);

    vec sum[kD / kLanes];
    const float shrink = block_peak > before ? exp_nonpositive(before - peak) : 1.0f;
    for (int v = 0; v < kD / kLanes; ++v) sum[v] = load(row.sum + v * kLanes) * shrink;
    float mass = *row.mass * shrink;
    for (int64_t s = begin; s < end; ++s) {
        mass += weight[s];
        for (int v = 0; v < kD / kLanes; ++v) sum[v] += weight[s] * load(values + s * kD + v * kLanes);
    }
    for (int v = 0; v < kD / kLanes; ++v) save(sum[v], row.sum + v * kLanes);
    *row.mass = mass;
    *row.peak = peak;
}

// kD: the head size where it is common and blocks have 16 positions, else 0.
template <typename scalar, int kD>
void attend_item(const Step& step, int64_t item) {
    const int64_t D = kD ? kD : step.head_dim, S = kD ? kLanes : step.block_tokens;
    const int32_t* tile = step.tiles + 3 * (item / step.kv_heads);
    const int64_t head = item % step.kv_heads;
    const int64_t group = step.query_heads / step.kv_heads;
    const int64_t tokens = tile[2], rows = tokens * group;
    const int32_t* table = step.tables + tile[0] * step.table_width;
    const int32_t* positions = step.positions + tile[1];

    thread_local std::vector<float> scratch;
    scratch.resize(size_t(rows * (2 * D + 2) + S + 2 * D * S));
    float* queries = scratch.data();
    float* sums = queries + rows * D;
    float* peaks = sums + rows * D;
    float* masses = peaks + rows;
    float* scores = masses + rows;
    float* wide_keys = scores + S;
    float* wide_values = wide_keys + D * S;

    for (int64_t r = 0; r < rows; ++r) {
        const scalar* source = static_cast<const scalar*>(step.query) + (tile[1] + r / group) * step.query_stride_token +
                               (head * group + r % group) * step.query_stride_head;
        for (int64_t d = 0; d < D; ++d) queries[r * D + d] = to_float(source[d]) * step.scale;
        for (int64_t d = 0; d < D; ++d) sums[r * D + d] = 0.0f;
        peaks[r] = kLowest;
        masses[r] = 0.0f;
    }

    const int64_t last = positions[tokens - 1];
    const int64_t first = step.window && positions[0] >= step.window ? positions[0] - step.window + 1 : 0;
    for (int64_t b = first / S; b <= last / S; ++b) {
        const int64_t base = (int64_t(table[b]) * step.kv_heads + head) * D * S;
        const float* keys = widen(static_cast<const scalar*>(step.key_cache) + base, wide_keys, D * S);
        const float* values = widen(static_cast<const scalar*>(step.value_cache) + base, wide_values, D * S);
        for (int64_t r = 0; r < rows; ++r) {
            const int64_t position = positions[r / group];
            const int64_t end = position - b * S + 1 < S ? position - b * S + 1 : S;
            const int64_t low = step.window ? position - step.window + 1 - b * S : 0;
            const int64_t begin = low > 0 ? low : 0;
            if (begin >= end) continue;
            const Row row = {queries + r * D, sums + r * D, peaks + r, masses + r};
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

template <typename scalar, int kD>
void attend_all(const Step& step, int threads) {
    const int64_t items = step.num_tiles * step.kv_heads;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t item = 0; item < items; ++item) attend_item<scalar, kD>(step, item);
}

template <typename scalar>
void attend(const Step& step, int threads) {
    if (step.block_tokens == kLanes) {
        switch (step.head_dim) {
            case 16: return attend_all<scalar, 16>(step, threads);
            case 32: return attend_all<scalar, 32>(step, threads);
            case 64: return attend_all<scalar, 64>(step, threads);
            case 80: return attend_all<scalar, 80>(step, threads);
            case 96: return attend_all<scalar, 96>(step, threads);
            case 128: return attend_all<scalar, 128>(step, threads);
            case 256: return attend_all<scalar, 256>(step, threads);
        }
    }
    attend_all<scalar, 0>(step, threads);
}

template <typename scalar>
void store(const scalar* keys, int64_t key_stride_token, int64_t key_stride_head, const scalar* values,
           int64_t value_stride_token, int64_t value_stride_head, scalar* key_cache, scalar* value_cache,
           const int64_t* slots, int64_t tokens, int64_t heads, int64_t D, int64_t S) {
    for (int64_t t = 0; t < tokens; ++t) {
        const int64_t block = slots[t] / S, offset = slots[t] % S;
        for (int64_t h = 0; h < heads; ++h) {
            const int64_t base = (block * heads + h) * D * S;
            const scalar* key = keys + t * key_stride_token + h * key_stride_head;
            const scalar* value = values + t * value_stride_token + h * value_stride_head;
            for (int64_t d = 0; d < D; ++d) key_cache[base + d * S + offset] = key[d];
            std::memcpy(value_cache + base + offset * D, value, size_t(D) * sizeof(scalar));
        }
    }
}

}  // namespace

extern "C" {

int tessera_kernel_version() { return 1; }
int tessera_max_rows() { return kMaxRows; }

void tessera_attend(int is_bf16, int threads, const Step* step) {
    if (is_bf16)
        attend<bf16>(*step, threads);
    else
        attend<float>(*step, threads);
}

void tessera_store(int is_bf16, const void* keys, int64_t key_stride_token, int64_t key_stride_head, const void* values,
                   int64_t value_stride_token, int64_t value_stride_head, void* key_cache, void* value_cache,
                   const int64_t* slots, int64_t tokens, int64_t heads, int64_t head_dim, int64_t block_tokens) {
    if (is_bf16)
        store(static_cast<const bf16*>(keys), key_stride_token, key_stride_head, static_cast<const bf16*>(values),
              value_stride_token, value_stride_head, static_cast<bf16*>(key_cache), static_cast<bf16*>(value_cache), slots,
              tokens, heads, head_dim, block_tokens);
    else
        store(static_cast<const float*>(keys), key_stride_token, key_stride_head, static_cast<const float*>(values),
              value_stride_token, value_stride_head, static_cast<float*>(key_cache), static_cast<float*>(value_cache), slots,
              tokens, heads, head_dim, block_tokens);
}
}
