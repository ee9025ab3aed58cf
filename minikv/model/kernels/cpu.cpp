// Attention on a CPU that reads K and V where they lie, through block tables.
//
// Plain C interface, plain C++17, no intrinsics: loops that compilers turn into vector code. Slots
// past a request's seq_len are never read; sums are float32 whatever the pool's type is.
//
// One piece of work is (request, kv head, tile of queries). Its rows, queries x the query heads that
// share the kv head, meet the keys in tiles of TILE slots, each read once for all rows. The softmax
// is the online one (kernels/online.py says how that works).

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16, COLUMNS = 4;  // floats in a vector; vectors of a product kept in registers
#elif defined(__AVX__)
constexpr int LANES = 8, COLUMNS = 2;
#else
constexpr int LANES = 4, COLUMNS = 4;
#endif
typedef float Vec __attribute__((vector_size(LANES * sizeof(float)), aligned(4), may_alias));

inline Vec& at(float* p) { return *reinterpret_cast<Vec*>(p); }
inline const Vec& at(const float* p) { return *reinterpret_cast<const Vec*>(p); }

// The sum, or the largest, of N numbers, by halves: a plain loop would have to keep its order, and
// that is N steps that wait for each other.
enum Fold { SUM, LARGEST };
template <Fold FOLD, int N>
inline float fold(const float* x) {
    if constexpr (N == 2) {
        return FOLD == SUM ? x[0] + x[1] : x[0] > x[1] ? x[0] : x[1];
    } else {
        typedef float Half __attribute__((vector_size(N / 2 * sizeof(float)), aligned(4), may_alias));
        const Half a = *reinterpret_cast<const Half*>(x);
        const Half b = *reinterpret_cast<const Half*>(x + N / 2);
        const Half joined = FOLD == SUM ? a + b : a > b ? a : b;
        return fold<FOLD, N / 2>(reinterpret_cast<const float*>(&joined));
    }
}
template <Fold FOLD>
inline float fold(const Vec& x) {
    return fold<FOLD, LANES>(reinterpret_cast<const float*>(&x));
}

constexpr int TILE = 64;         // slots per tile: K and V of one tile fit the first-level cache
constexpr int MAX_ROWS = 96;     // rows per piece of work: they share the conversion of a tile
constexpr int FEW_ROWS = 8;      // up to these, transposing K costs more than it saves
constexpr int ROW_GROUP = 6;     // rows of a product kept in registers
constexpr float NEVER = -std::numeric_limits<float>::infinity();

struct bf16 {
    uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}

inline Vec widen(const float* from) { return at(from); }
inline Vec widen(const bf16* from) {
    Vec to{};
    for (int i = 0; i < LANES; i++) to[i] = to_float(from[i]);
    return to;
}

inline void store(float* to, float x) { *to = x; }
inline void store(bf16* to, float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    to->bits = uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);  // to nearest, ties to even
}

// e^x for x <= 0 to 2e-7 of its value: 2^n e^r with n whole and |r| <= ln(2) / 2. A NaN stays one.
inline float exp_of(float x) {
    x = x < -87.0f ? -87.0f : x;  // below it would leave the normal floats; 1e-38 is 0 to a softmax
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number, which then
    float shifted = x * 1.44269504f + magic;  // stands in the last bits
    float n = shifted - magic;
    float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts, the first exact
    float p = 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    uint32_t bits;
    std::memcpy(&bits, &shifted, 4);
    bits = (bits + 127) << 23;  // the exponent of 2^n
    float power;
    std::memcpy(&power, &bits, 4);
    return p * power;
}

inline float tanh_of(float x) {
    float e = exp_of(-2.0f * std::fabs(x));
    return std::copysign((1.0f - e) / (1.0f + e), x);
}

// -- products ------------------------------------------------------------------------------------

template <int R, int C>
inline void product(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int n,
                    float* out, int64_t out_stride) {
    Vec sum[R][C];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++)
            sum[r][c] = at(out + r * out_stride + c * LANES);
    for (int k = 0; k < n; k++) {
        Vec row[C];
        for (int c = 0; c < C; c++) row[c] = at(b + k * b_stride + c * LANES);
        for (int r = 0; r < R; r++) {
            const float x = a[r * a_stride + k];
            for (int c = 0; c < C; c++) sum[r][c] += x * row[c];
        }
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++)
            at(out + r * out_stride + c * LANES) = sum[r][c];
}

// out[r, c] += sum over k < n of a[r, k] * b[k, c], for R rows and `width` columns, a multiple of
// LANES. The strides are numbers per row.
template <int R>
void add_product(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int n,
                 float* out, int64_t out_stride, int width) {
    int c = 0;
    for (; c + COLUMNS * LANES <= width; c += COLUMNS * LANES)
        product<R, COLUMNS>(a, a_stride, b + c, b_stride, n, out + c, out_stride);
    for (; c < width; c += LANES)
        product<R, 1>(a, a_stride, b + c, b_stride, n, out + c, out_stride);
}

inline void add_product(int rows, const float* a, int64_t a_stride, const float* b,
                        int64_t b_stride, int n, float* out, int64_t out_stride, int width) {
    switch (rows) {
        case 1: return add_product<1>(a, a_stride, b, b_stride, n, out, out_stride, width);
        case 2: return add_product<2>(a, a_stride, b, b_stride, n, out, out_stride, width);
        case 3: return add_product<3>(a, a_stride, b, b_stride, n, out, out_stride, width);
        case 4: return add_product<4>(a, a_stride, b, b_stride, n, out, out_stride, width);
        case 5: return add_product<5>(a, a_stride, b, b_stride, n, out, out_stride, width);
        default: return add_product<6>(a, a_stride, b, b_stride, n, out, out_stride, width);
    }
}

// -- one piece of work ---------------------------------------------------------------------------

struct Shape {
    int64_t num_kv_heads, per_kv, head_dim, block_size;
    int64_t pool_blocks;                            // the padding block included
    int64_t query_token_stride, query_head_stride;  // in numbers
    int64_t window;                                 // 0: none
    float scaling, softcap;                         // softcap 0: none
};

struct Step {
    const int32_t *block_tables, *query_start_loc, *seq_lens, *first_visible;  // the last may be null
    int64_t num_seqs, max_blocks;
};

struct Work {
    int seq, kv_head, first_query, num_queries;
};

struct Scratch {
    std::vector<float> query, keys, values, mixed, scores, largest, total;
    void fit(int rows, int width) {
        query.assign(rows * width, 0.0f);
        mixed.assign(rows * width, 0.0f);
        largest.assign(rows, NEVER);
        total.assign(rows, 0.0f);
        keys.resize(TILE * width);
        values.resize(TILE * width);
        scores.resize(std::max(FEW_ROWS, ROW_GROUP) * TILE);
    }
};

// WIDTH is head_dim where it is a usual one: loops of known length are faster. 0: any other.
template <typename T, int WIDTH>
struct Kernel {
    const Shape& shape;
    const Step& step;
    const T *query, *pool;
    T* out;

    static constexpr bool USUAL = WIDTH > 0;
    int head_dim() const { return USUAL ? WIDTH : int(shape.head_dim); }
    // Rows in scratch are whole vectors; what exceeds head_dim is 0.
    int row_width() const { return (head_dim() + LANES - 1) / LANES * LANES; }
    const int G = int(shape.per_kv);
    Scratch s{};

    // Of the piece of work at hand. Positions count slots, a static batch's padding included.
    int seq = 0, kv_head = 0, rows = 0, position = 0, padding = 0;

    void run(const Work& w) {
        const int D = head_dim(), width = row_width();
        seq = w.seq, kv_head = w.kv_head, rows = w.num_queries * G;
        const int first_row = step.query_start_loc[seq] + w.first_query;
        const int query_len = step.query_start_loc[seq + 1] - step.query_start_loc[seq];
        position = step.seq_lens[seq] - query_len + w.first_query;  // of the first query
        padding = step.first_visible ? step.first_visible[seq] : 0;
        s.fit(rows, width);
        for (int r = 0; r < rows; r++) {
            const T* q = query + (first_row + r / G) * shape.query_token_stride +
                         (kv_head * G + r % G) * shape.query_head_stride;
            for (int d = 0; d < D; d++) s.query[r * width + d] = to_float(q[d]) * shape.scaling;
        }
        const int end = position + w.num_queries;
        for (int start = first_slot(position); start < end; start += TILE) {
            const int n = std::min(TILE, end - start);
            if (USUAL && rows <= FEW_ROWS)
                few_rows(start, n);
            else
                many_rows(start, n);
        }
        for (int r = 0; r < rows; r++) {
            T* o = out + ((first_row + r / G) * shape.num_kv_heads * G + kv_head * G + r % G) * D;
            const float scale = 1.0f / s.total[r];  // a query sees itself: never 0
            for (int d = 0; d < D; d++) store(o + d, s.mixed[r * width + d] * scale);
        }
    }

    // What a query at this position sees begins there and ends with its own slot. A padding query
    // sees itself alone.
    int first_slot(int position) const {
        const int first = std::min(padding, position);
        return shape.window ? std::max(first, position - int(shape.window) + 1) : first;
    }

    // Calls use(t, row) for the rows of K (half 0) or V (half 1) of slots start + t, t < n.
    template <typename Use>
    void each_row(int half, int start, int n, Use use) const {
        const int B = int(shape.block_size), D = head_dim();
        const int32_t* table = step.block_tables + seq * step.max_blocks;
        const int64_t block_stride = shape.num_kv_heads * B * D;
        const T* base = pool + half * shape.pool_blocks * block_stride + int64_t(kv_head) * B * D;
        const int last_block = (step.seq_lens[seq] - 1) / B;
        int index = start / B, offset = start % B;
        for (int t = 0; t < n; index++, offset = 0) {
            const int run_end = std::min(n, t + B - offset);
            const T* row = base + table[index] * block_stride + offset * D;
            // The next block lies elsewhere, where the hardware does not look for it by itself.
            const T* ahead = base + table[std::min(index + 1, last_block)] * block_stride;
            for (; t < run_end; t++, row += D, ahead += D) {
                for (int d = 0; d < D; d += 64 / int(sizeof(T))) __builtin_prefetch(ahead + d);
                use(t, row);
            }
        }
    }

    // Decoding: K and V are used as they are read, so that the arithmetic fills the time that the
    // reading takes.
    void few_rows(int start, int n) {
        constexpr int W = USUAL ? WIDTH / LANES : 1;
        const int rows = this->rows;
        float *scores = s.scores.data(), *mixed = s.mixed.data();
        const float* q = s.query.data();
        each_row(0, start, n, [&](int t, const T* row) {
            Vec key[W];
            for (int c = 0; c < W; c++) key[c] = widen(row + c * LANES);
            for (int r = 0; r < rows; r++) {
                Vec sum = at(q + r * WIDTH) * key[0];
                for (int c = 1; c < W; c++) sum += at(q + r * WIDTH + c * LANES) * key[c];
                scores[r * TILE + t] = fold<SUM>(sum);
            }
        });
        for (int r = 0; r < rows; r++) weigh(r, scores + r * TILE, start);
        each_row(1, start, n, [&](int t, const T* row) {
            Vec value[W];
            for (int c = 0; c < W; c++) value[c] = widen(row + c * LANES);
            for (int r = 0; r < rows; r++)
                for (int c = 0; c < W; c++)
                    at(mixed + r * WIDTH + c * LANES) += scores[r * TILE + t] * value[c];
        });
    }

    // A chunk: K and V become floats once for all rows, K transposed, [width, TILE], so that one
    // vector holds many keys.
    void many_rows(int start, int n) {
        const int D = head_dim(), width = row_width();
        float *keys = s.keys.data(), *values = s.values.data(), *scores = s.scores.data();
        each_row(0, start, n, [&](int t, const T* __restrict row) {
            for (int d = 0; d < D; d++) keys[d * TILE + t] = to_float(row[d]);
        });
        each_row(1, start, n, [&](int t, const T* __restrict row) {
            float* __restrict to = values + t * width;
            for (int d = 0; d < D; d++) to[d] = to_float(row[d]);
        });
        for (int r = 0; r < rows; r += ROW_GROUP) {
            const int group = std::min(ROW_GROUP, rows - r);
            std::fill(scores, scores + ROW_GROUP * TILE, 0.0f);
            add_product(group, &s.query[r * width], width, keys, TILE, D, scores, TILE, TILE);
            for (int i = 0; i < group; i++) weigh(r + i, scores + i * TILE, start);
            add_product(group, scores, TILE, values, width, n, &s.mixed[r * width], width, width);
        }
    }

    // Turns row r's scores of a tile into weights: exp(score - largest so far), which for slots that
    // it does not see is 0, or the 1e-38 that exp_of makes of -infinity; what the row has summed up
    // so far is brought to the same measure. The loops run over the whole tile, as loops of known
    // length are faster.
    void weigh(int r, float* scores, int start) {
        const int own = position + r / G;
        const int from = std::max(first_slot(own) - start, 0), to = std::min(own + 1 - start, TILE);
        if (from >= to) return (void)std::fill(scores, scores + TILE, 0.0f);
        if (shape.softcap != 0.0f) {
            const float cap = shape.softcap, inverse = 1.0f / cap;
            for (int t = 0; t < TILE; t++) scores[t] = cap * tanh_of(scores[t] * inverse);
        }
        std::fill(scores, scores + from, NEVER);
        std::fill(scores + to, scores + TILE, NEVER);
        Vec most = at(scores);
        for (int t = LANES; t < TILE; t += LANES)
            most = at(scores + t) > most ? at(scores + t) : most;
        const float largest = std::max(s.largest[r], fold<LARGEST>(most));
        for (int t = 0; t < TILE; t++) scores[t] = exp_of(scores[t] - largest);
        Vec sum = at(scores);
        for (int t = LANES; t < TILE; t += LANES) sum += at(scores + t);
        if (largest > s.largest[r]) {
            const float shrink = exp_of(s.largest[r] - largest);
            for (int d = 0; d < row_width(); d++) s.mixed[r * row_width() + d] *= shrink;
            s.total[r] *= shrink;
            s.largest[r] = largest;
        }
        s.total[r] += fold<SUM>(sum);
    }
};

template <typename T, int WIDTH>
void attend(const Shape& shape, const Step& step, const T* query, const T* pool, T* out,
            int num_threads) {
    const int tile = int(std::max<int64_t>(1, MAX_ROWS / shape.per_kv));
    std::vector<Work> all;
    for (int seq = 0; seq < step.num_seqs; seq++) {
        const int num_queries = step.query_start_loc[seq + 1] - step.query_start_loc[seq];
        for (int first = 0; first < num_queries; first += tile)
            for (int head = 0; head < shape.num_kv_heads; head++)
                all.push_back({seq, head, first, std::min(tile, num_queries - first)});
    }
    // The whole team, even where it is larger than the work: gcc's runtime ends the threads that a
    // smaller team leaves out, and the next matrix product starts them anew, in every layer.
    if (all.size() == 1) num_threads = 1;
#pragma omp parallel num_threads(num_threads)
    {
        Kernel<T, WIDTH> kernel{shape, step, query, pool, out};
        // From the end: a chunk's last queries see most, and what is long should not come last.
#pragma omp for schedule(dynamic)
        for (int i = int(all.size()) - 1; i >= 0; i--) kernel.run(all[i]);
    }
}

template <typename T>
void attend(const Shape& shape, const Step& step, const void* query, const void* pool, void* out,
            int num_threads) {
    const auto* q = static_cast<const T*>(query);
    const auto* p = static_cast<const T*>(pool);
    auto* o = static_cast<T*>(out);
    switch (shape.head_dim) {  // the usual ones, with loops of known length
        case 64: return attend<T, 64>(shape, step, q, p, o, num_threads);
        case 96: return attend<T, 96>(shape, step, q, p, o, num_threads);
        case 128: return attend<T, 128>(shape, step, q, p, o, num_threads);
        case 256: return attend<T, 256>(shape, step, q, p, o, num_threads);
        default: return attend<T, 0>(shape, step, q, p, o, num_threads);
    }
}

}  // namespace

// query: [T, num_query_heads, head_dim] with the strides in `shape`; pool: [2, pool_blocks,
// num_kv_heads, block_size, head_dim]; out: [T, num_query_heads, head_dim], no strides.
extern "C" void minikv_attend(const Shape* shape, const Step* step, const void* query,
                              const void* pool, void* out, int is_bf16, int num_threads) {
    if (is_bf16)
        attend<bf16>(*shape, *step, query, pool, out, num_threads);
    else
        attend<float>(*shape, *step, query, pool, out, num_threads);
}

// Copies the step's new rows of K and V, [num_kv_heads, T, head_dim] with these strides in bytes, to
// the pool's rows that write_rows names: T x num_kv_heads for K, then as many for V.
extern "C" void minikv_write_kv(void* pool, const int64_t* write_rows, const void* key,
                                const void* value, int64_t num_tokens, int64_t num_kv_heads,
                                int64_t row_bytes, int64_t key_token_stride, int64_t key_head_stride,
                                int64_t value_token_stride, int64_t value_head_stride,
                                int num_threads) {
    auto* to = static_cast<char*>(pool);
    const auto *k = static_cast<const char*>(key), *v = static_cast<const char*>(value);
    const int64_t* rows_of_v = write_rows + num_tokens * num_kv_heads;
#pragma omp parallel for num_threads(num_threads) if (num_tokens >= 64)
    for (int64_t t = 0; t < num_tokens; t++)
        for (int64_t h = 0; h < num_kv_heads; h++) {
            const int64_t i = t * num_kv_heads + h;
            std::memcpy(to + write_rows[i] * row_bytes,
                        k + t * key_token_stride + h * key_head_stride, row_bytes);
            std::memcpy(to + rows_of_v[i] * row_bytes,
                        v + t * value_token_stride + h * value_head_stride, row_bytes);
        }
}
