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
inline void from_float(float x, float& out) { out = x; }
inline void from_float(float x, bf16& out) {
    uint32_t wide;
    std::memcpy(&wide, &x, 4);
    // Round to nearest even; a NaN stays one.
    out.bits = std::isnan(x) ? uint16_t(0x7fc0) : uint16_t((wide + 0x7fffu + ((wide >> 16) & 1u)) >> 16);
}

// exp(x) for x <= 0, relative error about 2e-7: 2^n times a polynomial of the remainder (Cephes' coefficients).
inline float exp_nonpositive(float x) {
    x = x < -87.0f ? -87.0f : x;
    float n = std::nearbyintf(x * 1.44269504088896341f);
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t bits = (int32_t(n) + 127) << 23;
    float scale;
    std::memcpy(&scale, &bits, 4);
    return p * scale;
}

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

// D and S are compile-time constants where they are common, so that the inner loops become straight vector code.
template <typename scalar, int kD, int kS>
void attend_item(const Step& step, int64_t item) {
    const int64_t D = kD ? kD : step.head_dim, S = kS ? kS : step.block_tokens;
    const int32_t* tile = step.tiles + 3 * (item / step.kv_heads);
    const int64_t head = item % step.kv_heads;
    const int64_t group = step.query_heads / step.kv_heads;
    const int64_t tokens = tile[2], rows = tokens * group;
    const int32_t* table = step.tables + tile[0] * step.table_width;
    const int32_t* positions = step.positions + tile[1];

    thread_local std::vector<float> scratch;
    scratch.resize(size_t(rows * (2 * D + 2) + S));
    float* queries = scratch.data();
    float* sums = queries + rows * D;
    float* peaks = sums + rows * D;
    float* masses = peaks + rows;
    float* scores = masses + rows;

    for (int64_t r = 0; r < rows; ++r) {
        const scalar* source = static_cast<const scalar*>(step.query) + (tile[1] + r / group) * step.query_stride_token +
                               (head * group + r % group) * step.query_stride_head;
        for (int64_t d = 0; d < D; ++d) queries[r * D + d] = to_float(source[d]) * step.scale;
        for (int64_t d = 0; d < D; ++d) sums[r * D + d] = 0.0f;
        peaks[r] = kLowest;
        masses[r] = 0.0f;
    }

    const int64_t last = positions[tokens - 1];
    const int64_t first = step.window ? (positions[0] - step.window + 1 > 0 ? positions[0] - step.window + 1 : 0) : 0;
    for (int64_t b = first / S; b <= last / S; ++b) {
        const int64_t base = (int64_t(table[b]) * step.kv_heads + head) * D * S;
        const scalar* keys = static_cast<const scalar*>(step.key_cache) + base;
        const scalar* values = static_cast<const scalar*>(step.value_cache) + base;
        for (int64_t r = 0; r < rows; ++r) {
            const int64_t position = positions[r / group];
            const int64_t end = position - b * S + 1 < S ? position - b * S + 1 : S;  // positions [begin, end) of the block are seen
            const int64_t low = step.window ? position - step.window + 1 - b * S : 0;
            const int64_t begin = low > 0 ? low : 0;
            if (begin >= end) continue;

            const float* query = queries + r * D;
            if constexpr (kS > 0) {
                float accumulators[4][kS > 0 ? kS : 1];
                for (int u = 0; u < 4; ++u)
                    for (int s = 0; s < kS; ++s) accumulators[u][s] = 0.0f;
                for (int64_t d = 0; d < D; d += 4)
                    for (int u = 0; u < 4; ++u)
                        for (int s = 0; s < kS; ++s) accumulators[u][s] += query[d + u] * to_float(keys[(d + u) * kS + s]);
                for (int s = 0; s < kS; ++s)
                    scores[s] = (accumulators[0][s] + accumulators[1][s]) + (accumulators[2][s] + accumulators[3][s]);
            } else {
                for (int64_t s = 0; s < S; ++s) scores[s] = 0.0f;
                for (int64_t d = 0; d < D; ++d)
                    for (int64_t s = 0; s < S; ++s) scores[s] += query[d] * to_float(keys[d * S + s]);
            }
            // What lies outside [begin, end) may be another sequence's leftovers, NaN included: it is overwritten, not multiplied.
            for (int64_t s = 0; s < begin; ++s) scores[s] = kLowest;
            for (int64_t s = end; s < S; ++s) scores[s] = kLowest;

            float peak = peaks[r];
            for (int64_t s = 0; s < S; ++s) peak = scores[s] > peak ? scores[s] : peak;
            if (peak > peaks[r]) {
                const float shrink = exp_nonpositive(peaks[r] - peak);
                masses[r] *= shrink;
                for (int64_t d = 0; d < D; ++d) sums[r * D + d] *= shrink;
                peaks[r] = peak;
            }
            for (int64_t s = 0; s < S; ++s) scores[s] = exp_nonpositive(scores[s] - peak);
            float mass = 0.0f;
            for (int64_t s = begin; s < end; ++s) mass += scores[s];
            masses[r] += mass;
            float* sum = sums + r * D;
            if constexpr (kD > 0) {
                float local[kD > 0 ? kD : 1];
                for (int d = 0; d < kD; ++d) local[d] = sum[d];
                for (int64_t s = begin; s < end; ++s)
                    for (int d = 0; d < kD; ++d) local[d] += scores[s] * to_float(values[s * kD + d]);
                for (int d = 0; d < kD; ++d) sum[d] = local[d];
            } else {
                for (int64_t s = begin; s < end; ++s)
                    for (int64_t d = 0; d < D; ++d) sum[d] += scores[s] * to_float(values[s * D + d]);
            }
        }
    }

    for (int64_t r = 0; r < rows; ++r) {
        scalar* target = static_cast<scalar*>(step.out) +
                         ((tile[1] + r / group) * step.query_heads + head * group + r % group) * D;
        const float inverse = 1.0f / masses[r];
        for (int64_t d = 0; d < D; ++d) from_float(sums[r * D + d] * inverse, target[d]);
    }
}

template <typename scalar, int kD, int kS>
void attend_all(const Step& step, int threads) {
    const int64_t items = step.num_tiles * step.kv_heads;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t item = 0; item < items; ++item) attend_item<scalar, kD, kS>(step, item);
}

template <typename scalar>
void attend(const Step& step, int threads) {
    if (step.block_tokens == 16) {
        switch (step.head_dim) {
            case 32: return attend_all<scalar, 32, 16>(step, threads);
            case 64: return attend_all<scalar, 64, 16>(step, threads);
            case 80: return attend_all<scalar, 80, 16>(step, threads);
            case 96: return attend_all<scalar, 96, 16>(step, threads);
            case 128: return attend_all<scalar, 128, 16>(step, threads);
            case 256: return attend_all<scalar, 256, 16>(step, threads);
        }
    }
    attend_all<scalar, 0, 0>(step, threads);
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
