/* One decode step of attention on a CPU: softmax(scale q k^T) v for the query rows of every group.
 *
 * K and V are read once, in tiles of TILE tokens that stay in the L1 cache. The rows of a group share a tile, and the
 * softmax is kept as a running maximum and sum (Milakov and Gimelshein 2018). Groups of many rows, as of MLA and MQA,
 * are matrix products of whole tiles: the second half of this file. Long sequences are split over threads, and the parts
 * are merged (Dao et al. 2023, "Flash-Decoding"). Everything is computed in fp32.
 *
 * A vector has as many lanes as a register of the processor: 16 (AVX-512), 8 (AVX2) or 4. GCC splits wider vectors badly.
 * Sums and products use the vector extensions that both GCC and clang support, and conversions the instructions of the
 * processor, if it has them.
 */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

/* SUMS is how many running sums of scores are in registers at the same time. `mix` has 16 sums, or 12 where SUMS is 8.
 * There are 32 registers with AVX-512 and NEON, and 16 otherwise. */
#if defined(__AVX512F__)
#define LANES 16
#define SUMS 16
#elif defined(__AVX2__)
#define LANES 8
#define SUMS 8
#elif defined(__aarch64__)
#define LANES 4
#define SUMS 16
#else
#define LANES 4
#define SUMS 8
#endif

#define TILE 16
/* Of groups with many rows: the tokens of a tile, the rows of a panel of the query, the depth that is multiplied at a
 * time, the sums in registers, and the most rows of them beside one vector. */
#define WIDE_ROWS (PANEL > 32 ? PANEL : 32)
#define WIDE_TILE 64
#define DEPTH 96
#if SUMS == 16
#define PANEL (4 * LANES)
#define MOST_SUMS 24
#define MOST_ROWS 12
#else
#define PANEL (2 * LANES)
#define MOST_SUMS 12
#define MOST_ROWS 12
#endif
#define CONVERT __builtin_convertvector
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float vec_u __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t veci __attribute__((vector_size(4 * LANES)));
typedef uint32_t vecu __attribute__((vector_size(4 * LANES)));
typedef uint16_t half_u __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef int16_t halfi __attribute__((vector_size(2 * LANES)));
typedef int16_t halfi_u __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef int8_t byte_u __attribute__((vector_size(LANES), aligned(1), may_alias));

/* Arrays of sums stay in registers only if the loops over them are unrolled. */
#if defined(__clang__)
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#define UNROLL _Pragma("clang loop unroll(full)")
#define TWICE _Pragma("clang loop unroll_count(2)")
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, (veci){__VA_ARGS__})
#define UNROLL _Pragma("GCC unroll 32")
#define TWICE _Pragma("GCC unroll 2")
#endif

enum { FP32, FP16, BF16, INT8, FP8 };
static const int WIDTH[] = {4, 2, 2, 1, 1};

/* The location of the rows of K or V. Strides are in elements. With a block table, token s of sequence b is row
 * s % block of block table[b][s / block], and stride_b is the stride between blocks. With `starts`, sequence b begins at
 * starts[b] x stride_b, and else at b x stride_b. */
typedef struct {
    const char *data;
    const float *scales;
    int64_t stride_b, stride_g, stride_s;
    int64_t scale_b, scale_g, scale_s;
    int64_t width;
} Rows;

typedef struct {
    const int32_t *table;
    int64_t stride, block;
    const int64_t *starts;
} Pages;

INLINE vec splat(float x) { return x - (vec){0}; }

INLINE vec from_bits(vecu bits) {
    vec out;
    memcpy(&out, &bits, sizeof out);
    return out;
}

/* The larger one of each lane, or b if one of them is NaN. */
INLINE vec larger(vec a, vec b) {
#if defined(__AVX512F__)
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
    vecu of_a = (vecu)(a > b), x, y;
    memcpy(&x, &a, sizeof x);
    memcpy(&y, &b, sizeof y);
    return from_bits((x & of_a) | (y & ~of_a));
#endif
}

INLINE float largest_lane(vec a) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)a);
#elif defined(__AVX2__)
    __m128 b = _mm_max_ps(_mm256_castps256_ps128((__m256)a), _mm256_extractf128_ps((__m256)a, 1));
    b = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return fmaxf(b[0], b[1]);
#else
    return fmaxf(fmaxf(a[0], a[1]), fmaxf(a[2], a[3]));
#endif
}

/* Widen narrower floats to fp32 without a hardware conversion. `moved` has sign and magnitude at fp32's bit positions.
 * Its exponent is too small, and one multiplication by `repair` corrects it, also for subnormals. Magnitudes of at
 * least `special` are infinities and NaN, which have the largest exponent in fp32. */
INLINE vec widen_bits(vecu moved, float repair, uint32_t special) {
    vec value = from_bits(moved) * repair;
    vecu bits;
    memcpy(&bits, &value, sizeof bits);
    return from_bits(bits | ((vecu)(moved << 1 >= special << 1) & 0x7f800000u));
}

INLINE vecu load_bytes(const char *at) { /* each sign-extended to 32 bits */
#if defined(__AVX512F__)
    return (vecu)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)at));
#elif defined(__AVX2__)
    return (vecu)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)at));
#else /* through 16 bits, because GCC compiles a direct conversion to scalar code */
    return (vecu)CONVERT(CONVERT(*(const byte_u *)at, halfi), veci);
#endif
}

INLINE vec load_bf16(const char *at) {
#if defined(__AVX512F__)
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)at)), 16);
#elif defined(__AVX2__)
    return (vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)at)), 16);
#else
    return from_bits(CONVERT(*(const half_u *)at, vecu) << 16);
#endif
}

INLINE vec load_fp16(const char *at) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at));
#elif defined(__AVX2__) && defined(__F16C__)
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at));
#elif defined(__aarch64__)
    return (vec)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t *)at)));
#else
    vecu h = (vecu)CONVERT(*(const halfi_u *)at, veci);
    return widen_bits(h << 13 & 0x8fffe000u, 0x1p112f, 0x7c00u << 13);
#endif
}

/* Load LANES elements of `type` as fp32. */
INLINE vec load(const char *at, int64_t element, int type) {
    switch (type) {
    case FP32:
        return *(const vec_u *)(at + 4 * element);
    case BF16:
        return load_bf16(at + 2 * element);
    case FP16:
        return load_fp16(at + 2 * element);
    case INT8:
        return CONVERT((veci)load_bytes(at + element), vec);
    default: /* e4m3 has no infinities, and only its largest magnitude is NaN. */
        return widen_bits(load_bytes(at + element) << 20 & 0x87f00000u, 0x1p120f, 0x7fu << 20);
    }
}

INLINE float load_one(const char *at, int64_t element, int type) {
    char padded[4 * LANES] = {0};
    memcpy(padded, at + element * WIDTH[type], WIDTH[type]);
    return load(padded, 0, type)[0];
}

/* e^x for x <= 0, with an error within 2e-7: 2^n times a polynomial of the remainder. */
INLINE vec exp_vec(vec x) {
    x = larger(splat(-87.0f), x); /* in this order, NaN is preserved */
    vec n = x * 1.44269504f;
    veci whole = CONVERT(n - 0.5f, veci);
    n = CONVERT(whole, vec);
    vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    vec p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * from_bits((vecu)(whole + 127) << 23);
}

INLINE int64_t start_of(const Pages *pages, int64_t b) { return pages->starts ? pages->starts[b] : b; }

INLINE int64_t offset_of(const Rows *rows, const Pages *pages, int64_t b, int64_t g, int64_t s) {
    if (!pages->table)
        return start_of(pages, b) * rows->stride_b + g * rows->stride_g + s * rows->stride_s;
    int64_t block = pages->table[b * pages->stride + s / pages->block];
    return block * rows->stride_b + g * rows->stride_g + s % pages->block * rows->stride_s;
}

INLINE float scale_of(const Rows *rows, const Pages *pages, int64_t b, int64_t g, int64_t s) {
    if (!rows->scales)
        return 1.0f;
    if (!pages->table)
        return rows->scales[start_of(pages, b) * rows->scale_b + g * rows->scale_g + s * rows->scale_s];
    int64_t block = pages->table[b * pages->stride + s / pages->block];
    return rows->scales[block * rows->scale_b + g * rows->scale_g + s % pages->block * rows->scale_s];
}

/* Prefetch to L2. The tiles of now and later do not fit into L1 together. No address can fault. */
INLINE void fetch(const char *at) { __builtin_prefetch(at, 0, 2); }

/* Copy the rows of the tokens from `s` to before `end` to `tile` as fp32. Each row is padded with zeros to `padded`
 * elements, and the remaining rows are zero. The rows of the next tile, before token `last`, are prefetched. */
INLINE void widen(float *tile, const Rows *rows, const Pages *pages, int64_t b, int64_t g, int64_t s, int64_t end,
                  int64_t last, int64_t padded, int type) {
    int64_t whole = rows->width / LANES * LANES, bytes = rows->width * WIDTH[type];
    for (; s < end; s++, tile += padded) {
        int64_t at = offset_of(rows, pages, b, g, s);
        if (s + TILE < last) {
            const char *next = rows->data + offset_of(rows, pages, b, g, s + TILE) * WIDTH[type];
            for (int64_t i = 0; i < bytes; i += 64)
                fetch(next + i);
        }
        for (int64_t i = 0; i < whole; i += LANES)
            *(vec_u *)(tile + i) = load(rows->data, at + i, type);
        for (int64_t i = whole; i < padded; i++)
            tile[i] = i < rows->width ? load_one(rows->data, at + i, type) : 0.0f;
    }
}

/* Sum the lanes of each of LANES vectors. The result is one vector of the sums. With 8 lanes, the vectors that keep
 * their lanes in place are picked by a blend, and only the others by a shuffle, for which there is one port. */
INLINE vec sum_lanes(vec a[LANES]) {
#if LANES == 16
    UNROLL for (int i = 0; i < 8; i++)
        a[i] = PICK(a[i], a[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               PICK(a[i], a[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    UNROLL for (int i = 0; i < 4; i++)
        a[i] = PICK(a[i], a[i + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
               PICK(a[i], a[i + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    UNROLL for (int i = 0; i < 2; i++)
        a[i] = PICK(a[i], a[i + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
               PICK(a[i], a[i + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    return PICK(a[0], a[1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
           PICK(a[0], a[1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
#elif LANES == 8
    UNROLL for (int i = 0; i < 4; i++)
        a[i] = PICK(a[i], a[i + 4], 0, 1, 2, 3, 12, 13, 14, 15) + PICK(a[i], a[i + 4], 4, 5, 6, 7, 8, 9, 10, 11);
    UNROLL for (int i = 0; i < 2; i++)
        a[i] = PICK(a[i], a[i + 2], 0, 1, 10, 11, 4, 5, 14, 15) + PICK(a[i], a[i + 2], 2, 3, 8, 9, 6, 7, 12, 13);
    return PICK(a[0], a[1], 0, 8, 2, 10, 4, 12, 6, 14) + PICK(a[0], a[1], 1, 9, 3, 11, 5, 13, 7, 15);
#else
    UNROLL for (int i = 0; i < 2; i++)
        a[i] = PICK(a[i], a[i + 2], 0, 1, 4, 5) + PICK(a[i], a[i + 2], 2, 3, 6, 7);
    return PICK(a[0], a[1], 0, 4, 2, 6) + PICK(a[0], a[1], 1, 5, 3, 7);
#endif
}

/* The tokens of the next tile that are prefetched while rows `r` to `r + n` of all `rows` are computed, one bit each. A
 * tile is read several times, for some of the rows each time. Each time prefetches its share, in even intervals: the
 * buffers of outstanding reads are few, and after a burst the memory is idle. */
INLINE uint32_t turns_of(int r, int n, int rows) {
    uint32_t turns = 0;
    UNROLL for (int i = 0; i < 4; i++)
        if (i * rows >= 4 * r && i * rows < 4 * (r + n))
            turns |= 0x11111111u << ((i & 1) * 2 + i / 2);
    return turns;
}

/* Scores of `rows` query rows over a tile of keys of `type`, SUMS scores at a time. `next` is the next tile. */
INLINE void score(float *scores, const float *q, const char *k, const char *next, int64_t k_step, int64_t width,
                  int rows, int type, uint32_t turns) {
    int tokens = SUMS / rows;
    for (int t = 0; t < TILE; t += tokens) {
        vec sums[SUMS] = {{0}};
        float found[SUMS];
        TWICE for (int64_t i = 0; i < width; i += LANES) {
            if (LANES * WIDTH[type] == 64 || i * WIDTH[type] % 64 == 0)
                UNROLL for (int j = 0; j < tokens; j++)
                    if (turns >> (t + j) & 1)
                        fetch(next + ((t + j) * k_step + i) * WIDTH[type]);
            vec keys[SUMS];
            UNROLL for (int j = 0; j < tokens; j++)
                keys[j] = load(k, (t + j) * k_step + i, type);
            UNROLL for (int r = 0; r < rows; r++) {
                vec query = *(const vec_u *)(q + r * width + i);
                UNROLL for (int j = 0; j < tokens; j++)
                    sums[r * tokens + j] += keys[j] * query;
            }
        }
        UNROLL for (int n = 0; n < SUMS; n += LANES)
            *(vec_u *)(found + n) = sum_lanes(sums + n);
        UNROLL for (int r = 0; r < rows; r++)
            memcpy(scores + r * TILE + t, found + r * tokens, 4 * tokens);
    }
}

/* out[rows][width] += weights[rows][TILE] v[TILE][width], for `columns` vectors of the width at a time. */
INLINE void mix(float *out, const float *weights, const char *v, const char *next, int64_t v_step, int64_t width,
                int rows, int columns, int type, uint32_t turns) {
    int64_t i = 0;
    for (; i + columns * LANES <= width; i += columns * LANES) {
        vec sums[16];
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int c = 0; c < columns; c++)
                sums[r * columns + c] = *(vec_u *)(out + r * width + i + c * LANES);
        for (int t = 0; t < TILE; t++) {
            vec values[8];
            UNROLL for (int c = 0; c < columns; c++) {
                values[c] = load(v, t * v_step + i + c * LANES, type);
                if (c * LANES * WIDTH[type] % 64 == 0 && turns >> t & 1)
                    fetch(next + (t * v_step + i + c * LANES) * WIDTH[type]);
            }
            UNROLL for (int r = 0; r < rows; r++) {
                float weight = weights[r * TILE + t];
                UNROLL for (int c = 0; c < columns; c++)
                    sums[r * columns + c] += values[c] * weight;
            }
        }
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int c = 0; c < columns; c++)
                *(vec_u *)(out + r * width + i + c * LANES) = sums[r * columns + c];
    }
    for (; i < width; i += LANES)
        for (int r = 0; r < rows; r++) {
            vec sum = *(vec_u *)(out + r * width + i);
            for (int t = 0; t < TILE; t++)
                sum += load(v, t * v_step + i, type) * weights[r * TILE + t];
            *(vec_u *)(out + r * width + i) = sum;
        }
}

/* As many rows at a time as leave at least two tokens, or two vectors of the width, for the registers. */
INLINE void score_rows(float *scores, const float *q, const char *k, const char *next, int64_t step, int64_t width,
                       int rows, int type) {
    int r = 0;
#define SCORE(n) for (; r + n <= rows; r += n) \
        score(scores + r * TILE, q + r * width, k, next, step, width, n, type, \
              next ? turns_of(r, n, rows) : 0)
#if SUMS == 16
    SCORE(8);
#endif
    SCORE(4);
    SCORE(1);
}

INLINE void mix_rows(float *out, const float *weights, const char *v, const char *next, int64_t step, int64_t width,
                     int rows, int type) {
    int r = 0;
#define MIX(n, columns) for (; r + n <= rows; r += n) \
        mix(out + r * width, weights + r * TILE, v, next, step, width, n, columns, type, \
            next ? turns_of(r, n, rows) : 0)
#if SUMS == 16
    MIX(8, 2);
    MIX(4, 4);
#else
    MIX(6, 2);
    MIX(2, 4);
#endif
    MIX(1, 8);
}

/* score_rows and mix_rows for a tile in fp32. Compiled once for all types of cache. */
static __attribute__((noinline)) void score_tile(float *scores, const float *q, const float *k, int64_t width,
                                                 int rows) {
    score_rows(scores, q, (const char *)k, 0, width, width, rows, FP32);
}

static __attribute__((noinline)) void mix_tile(float *out, const float *weights, const float *v, int64_t step,
                                               int64_t width, int rows) {
    mix_rows(out, weights, (const char *)v, 0, step, width, rows, FP32);
}

/* Continue the softmax with a tile's scores. Updates `peak`, `total` and `out` of every row, and turns the scores into
 * weights. */
static __attribute__((noinline)) void weigh(float *scores, int count, int rows, float *out, int64_t width, float *peak, float *total,
                  const vec *k_scale, const vec *v_scale) {
    for (int r = 0; r < rows; r++) {
        float *row = scores + r * TILE;
        vec_u *four = (vec_u *)row;
        if (k_scale)
            for (int i = 0; i < TILE / LANES; i++)
                four[i] *= k_scale[i];
        for (int t = count; t < TILE; t++)
            row[t] = -INFINITY;
        vec highest = four[0];
        for (int i = 1; i < TILE / LANES; i++)
            highest = larger(highest, four[i]);
        float most = largest_lane(highest);
        vec_u *sum = (vec_u *)(total + r * LANES);
        if (most > peak[r]) {
            float shrink = peak[r] == -INFINITY ? 0.0f : expf(peak[r] - most);
            for (int64_t i = 0; i < width; i += LANES)
                *(vec_u *)(out + r * width + i) *= shrink;
            *sum *= shrink;
            peak[r] = most;
        }
        for (int i = 0; i < TILE / LANES; i++) {
            vec e = exp_vec(four[i] - peak[r]); /* 1e-38, so negligible, for tokens after the last one */
            *sum += e;
            four[i] = v_scale ? e * v_scale[i] : e;
        }
    }
}

INLINE int64_t pad(int64_t width) { return (width + LANES - 1) / LANES * LANES; }

/* Compute one part of one group: tokens `first` to `last`. `out` receives rows x pad(v width), not normalized. `peak`
 * and `total` receive the maximum of each row and its sum, in LANES parts. `q` is rows x pad(k width), scaled. */
INLINE void part(const float *q, const Rows *k, const Rows *v, const Pages *pages, int64_t b, int64_t g,
                 int64_t first, int64_t last, int rows, float *out, float *peak, float *total, float *work,
                 int type) {
    int64_t dk = pad(k->width), dv = pad(v->width);
    int shared = v->data == k->data && v->stride_s == k->stride_s; /* MLA: V is the front of K's row */
    float *k_tile = work, *v_tile = work + TILE * dk, *scores = v_tile + TILE * dv;
    /* K and V are converted on the fly. With many rows of 8 bits, whose conversion takes longest, it would be repeated too
     * often, so they use a tile in fp32. */
    int direct = (WIDTH[type] > 1 || rows <= 8) && (!pages->table || pages->block % TILE == 0);
    memset(out, 0, rows * dv * sizeof(float));
    memset(total, 0, rows * LANES * sizeof(float));
    for (int r = 0; r < rows; r++)
        peak[r] = -INFINITY;
    for (int64_t s = first; s < last; s += TILE) {
        int64_t end = s + TILE < last ? s + TILE : last, count = end - s, after = end < last ? end : s;
        if (count < TILE) { /* what is left of an earlier tile must not be NaN */
            memset(k_tile, 0, TILE * dk * sizeof(float));
            memset(v_tile, 0, TILE * dv * sizeof(float));
        }
#define AT(rows, token) (rows->data + offset_of(rows, pages, b, g, token) * WIDTH[type])
        if (direct && count == TILE && dk == k->width)
            score_rows(scores, q, AT(k, s), AT(k, after), k->stride_s, dk, rows, type);
        else {
            widen(k_tile, k, pages, b, g, s, end, last, dk, type);
            score_tile(scores, q, k_tile, dk, rows);
        }
        vec k_scale[TILE / LANES], v_scale[TILE / LANES];
        for (int t = 0; t < TILE && k->scales; t++) {
            k_scale[t / LANES][t % LANES] = t < count ? scale_of(k, pages, b, g, s + t) : 1.0f;
            v_scale[t / LANES][t % LANES] = t < count ? scale_of(v, pages, b, g, s + t) : 0.0f;
        }
        weigh(scores, count, rows, out, dv, peak, total, k->scales ? k_scale : 0, k->scales ? v_scale : 0);
        if (direct && count == TILE && dv == v->width)
            mix_rows(out, scores, AT(v, s), AT(v, after), v->stride_s, dv, rows, type);
        else if (shared && dv == v->width)
            mix_tile(out, scores, k_tile, dk, dv, rows);
        else {
            widen(v_tile, v, pages, b, g, s, end, last, dv, type);
            mix_tile(out, scores, v_tile, dv, dv, rows);
        }
    }
}

/* out[rows][columns] += a[rows][depth] b[depth][columns], with columns in vectors. All sums are in registers. Element
 * (r, d) of `a` is at r * a_row + d * a_step. What follows `a` or `b` in memory is prefetched, if it is given. */
INLINE void product(float *out, int64_t o_step, const float *a, int64_t a_row, int64_t a_step, const float *b,
                    int64_t b_step, int64_t depth, const float *next_a, const float *next_b, int rows, int columns) {
    vec sums[MOST_SUMS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < columns; c++)
            sums[r * columns + c] = *(vec_u *)(out + r * o_step + c * LANES);
    for (int64_t d = 0; d < depth; d++) {
        vec values[4];
        UNROLL for (int c = 0; c < columns; c++) {
            values[c] = *(const vec_u *)(b + d * b_step + c * LANES);
            if (next_b && c * LANES % 16 == 0)
                fetch((const char *)(next_b + d * b_step + c * LANES));
        }
        if (next_a && d % 16 == 0)
            UNROLL for (int r = 0; r < rows; r++)
                fetch((const char *)(next_a + r * a_row + d));
        UNROLL for (int r = 0; r < rows; r++) {
            float factor = a[r * a_row + d * a_step];
            UNROLL for (int c = 0; c < columns; c++)
                sums[r * columns + c] += values[c] * factor;
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < columns; c++)
            *(vec_u *)(out + r * o_step + c * LANES) = sums[r * columns + c];
}

/* product() for any number of rows. */
INLINE void product_rows(float *out, int64_t o_step, const float *a, int64_t a_row, int64_t a_step, const float *b,
                         int64_t b_step, int64_t depth, const float *next_a, const float *next_b, int rows,
                         int columns) {
    int r = 0;
#define PRODUCT(n) for (; r + n <= rows; r += n) \
        product(out + r * o_step, o_step, a + r * a_row, a_row, a_step, b, b_step, depth, \
                next_a ? next_a + r * a_row : 0, r ? 0 : next_b, n, columns)
    if (columns == 1)
        PRODUCT(MOST_ROWS);
    PRODUCT(6);
    PRODUCT(2);
    PRODUCT(1);
}

/* Scores of all rows over the tokens of a tile: scores[tokens][rows], from the panels of `q`. The depth is cut, so that
 * a piece of a panel and of the tile stay in the L1 cache. */
static __attribute__((noinline)) void score_wide(float *scores, const float *q, const float *k, const float *next,
                                                 int64_t k_step, int64_t dk, int tokens, int rows) {
    memset(scores, 0, tokens * rows * sizeof(float));
    for (int64_t d = 0; d < dk; d += DEPTH) {
        int64_t depth = d + DEPTH < dk ? DEPTH : dk - d;
        const float *after = next ? next + d : 0;
        for (int r = 0; r < rows; after = 0) {
            const float *panel = q + r * dk + d * PANEL;
            int left = rows - r;
            if (left >= PANEL) {
                product_rows(scores + r, rows, k + d, k_step, 1, panel, PANEL, depth, after, 0, tokens, PANEL / LANES);
                r += PANEL;
            } else
                for (int c = 0; c < left; c += LANES, r += LANES, after = 0)
                    product_rows(scores + r, rows, k + d, k_step, 1, panel + c, PANEL, depth, after, 0, tokens, 1);
        }
    }
}

/* out[rows][dv] += weights[tokens][rows] v[tokens][dv]. */
static __attribute__((noinline)) void mix_wide(float *out, const float *weights, int64_t w_step, const float *v,
                                               const float *next, int64_t v_step, int64_t dv, int tokens, int rows) {
    int64_t i = 0;
    for (; i + PANEL <= dv; i += PANEL)
        product_rows(out + i, dv, weights, 1, w_step, v + i, v_step, tokens, 0, next ? next + i : 0, rows,
                     PANEL / LANES);
    for (; i < dv; i += LANES)
        product_rows(out + i, dv, weights, 1, w_step, v + i, v_step, tokens, 0, next ? next + i : 0, rows, 1);
}

/* weigh() for scores[tokens][rows], LANES rows at a time. */
static __attribute__((noinline)) void weigh_wide(float *scores, int tokens, int64_t padded, int rows, float *out,
                                                 int64_t width, float *peak, float *total, const float *k_scale,
                                                 const float *v_scale) {
    for (int r = 0; r < padded; r += LANES) {
        float *column = scores + r;
#define ROW(t) (*(vec_u *)(column + (t) * padded))
        vec_u *most = (vec_u *)(peak + r), *sum = (vec_u *)(total + r);
        vec highest[4], sums[4] = {{0}};
        for (int i = 0; i < 4; i++)
            highest[i] = splat(-INFINITY);
        for (int t = 0; t < tokens; t++) {
            if (k_scale)
                ROW(t) *= k_scale[t];
            highest[t % 4] = larger(highest[t % 4], ROW(t));
        }
        vec found = larger(larger(highest[0], highest[1]), larger(highest[2], highest[3])), before = *most;
        *most = larger(before, found);
        for (int l = 0; l < LANES && r + l < rows; l++)
            if ((*most)[l] > before[l]) {
                float shrink = before[l] == -INFINITY ? 0.0f : expf(before[l] - (*most)[l]);
                for (int64_t i = 0; i < width; i += LANES)
                    *(vec_u *)(out + (r + l) * width + i) *= shrink;
                total[r + l] *= shrink;
            }
        vec now = *most;
        for (int t = 0; t < tokens; t++) {
            vec e = exp_vec(ROW(t) - now);
            sums[t % 4] += e;
            ROW(t) = v_scale ? e * v_scale[t] : e;
        }
        *sum += (sums[0] + sums[1]) + (sums[2] + sums[3]);
    }
}

/* Whether a group has so many rows that lanes of vectors are rows, and not elements of a row. Sums over the lanes are
 * then not needed, and a tile of keys or values is multiplied by all rows. */
INLINE int is_wide(int64_t rows) { return rows >= WIDE_ROWS; }

/* `part` for many rows. `q` has panels of PANEL rows: dk x PANEL. The sums of `total` are in the first of LANES. */
INLINE void part_wide(const float *q, const Rows *k, const Rows *v, const Pages *pages, int64_t b, int64_t g,
                      int64_t first, int64_t last, int rows, float *out, float *peak, float *total, float *work,
                      int type) {
    int64_t dk = pad(k->width), dv = pad(v->width), padded = pad(rows);
    int shared = v->data == k->data && v->stride_s == k->stride_s;
    float *k_tile = work, *v_tile = k_tile + WIDE_TILE * dk, *scores = v_tile + WIDE_TILE * dv;
    float *most = scores + WIDE_TILE * padded, *sums = most + padded;
    int direct = type == FP32 && dk == k->width && dv == v->width && (!pages->table || pages->block % WIDE_TILE == 0);
    memset(out, 0, rows * dv * sizeof(float));
    for (int64_t r = 0; r < padded; r++)
        most[r] = -INFINITY, sums[r] = 0.0f;
    for (int64_t s = first; s < last; s += WIDE_TILE) {
        int64_t end = s + WIDE_TILE < last ? s + WIDE_TILE : last, count = end - s;
        const float *keys = k_tile, *values = shared ? k_tile : v_tile, *next_k = 0, *next_v = 0;
        int64_t k_step = dk, v_step = shared ? dk : dv;
        if (direct) {
            keys = (const float *)AT(k, s), values = (const float *)AT(v, s), k_step = k->stride_s, v_step = v->stride_s;
            if (end + WIDE_TILE <= last)
                next_k = (const float *)AT(k, end), next_v = shared ? 0 : (const float *)AT(v, end);
        } else
            widen(k_tile, k, pages, b, g, s, end, last, dk, type);
        score_wide(scores, q, keys, next_k, k_step, dk, (int)count, (int)padded);
        float k_scale[WIDE_TILE], v_scale[WIDE_TILE];
        for (int t = 0; t < count && k->scales; t++) {
            k_scale[t] = scale_of(k, pages, b, g, s + t);
            v_scale[t] = scale_of(v, pages, b, g, s + t);
        }
        weigh_wide(scores, (int)count, padded, rows, out, dv, most, sums, k->scales ? k_scale : 0,
                   k->scales ? v_scale : 0);
        if (!direct && !shared)
            widen(v_tile, v, pages, b, g, s, end, last, dv, type);
        mix_wide(out, scores, padded, values, next_v, v_step, dv, (int)count, rows);
    }
    memset(total, 0, rows * LANES * sizeof(float));
    for (int r = 0; r < rows; r++)
        peak[r] = most[r], total[r * LANES] = sums[r];
}

/* The floats of a group's query, and of the scratch memory of a part. */
INLINE int64_t query_floats(int64_t rows, int64_t dk) {
    return dk * (is_wide(rows) ? (rows + PANEL - 1) / PANEL * PANEL : rows);
}

INLINE int64_t scratch_floats(int64_t rows, int64_t dk, int64_t dv) {
    return is_wide(rows) ? WIDE_TILE * (dk + dv + pad(rows)) + 2 * pad(rows) : TILE * (dk + dv + rows);
}

/* The number of parts of a group: `length` tokens each. */
INLINE int64_t splits_of(int64_t tokens, int64_t length) { return tokens > length ? (tokens + length - 1) / length : 1; }

/* The number of floats that `kvcalc_decode` needs in `work`. */
int64_t kvcalc_decode_work(int64_t batch, int64_t groups, int64_t rows, const int64_t *tokens, int64_t length,
                           int64_t k_width, int64_t v_width) {
    int64_t dk = pad(k_width), dv = pad(v_width), parts = 0;
    for (int64_t b = 0; b < batch; b++)
        parts += groups * splits_of(tokens[b], length);
    return batch * groups * query_floats(rows, dk) +
           parts * (rows * (dv + 1 + LANES) + scratch_floats(rows, dk, dv));
}

/* q is (batch, groups * rows, k width) and out is (batch, groups * rows, v width). Both are fp32 and dense. Sequence b
 * has `tokens[b]` tokens, in parts of `length`, which is a multiple of TILE. */
void kvcalc_decode(const float *q, const Rows *k, const Rows *v, const Pages *pages, float *out, float *work,
                  int64_t batch, int64_t groups, int64_t rows, const int64_t *tokens, int64_t length, float scale,
                  int type, int threads) {
    int64_t dk = pad(k->width), dv = pad(v->width), parts = 0;
    int64_t query = query_floats(rows, dk), each = rows * (dv + 1 + LANES) + scratch_floats(rows, dk, dv);
    float *scaled = work, *partial = work + batch * groups * query;
    int wide = is_wide(rows);
    for (int64_t b = 0; b < batch; b++)
        parts += groups * splits_of(tokens[b], length);
    memset(scaled, 0, batch * groups * query * sizeof(float));
    for (int64_t pair = 0; pair < batch * groups; pair++)
        for (int64_t r = 0, end; r < rows; r = end) {
            end = !wide ? r + 1 : r + PANEL < rows ? r + PANEL : rows;
            const float *from = q + (pair * rows + r) * k->width;
            for (int64_t i = 0; i < k->width; i++)
                for (int64_t n = 0; n < end - r; n++)
                    scaled[pair * query + r * dk + i * (wide ? PANEL : 1) + n] = from[n * k->width + i] * scale;
        }
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t p = 0; p < parts; p++) {
        int64_t b = 0, n = p;
        for (; n >= groups * splits_of(tokens[b], length); b++)
            n -= groups * splits_of(tokens[b], length);
        int64_t splits = splits_of(tokens[b], length), g = n / splits, first = n % splits * length;
        int64_t last = first + length < tokens[b] ? first + length : tokens[b];
        float *mine = partial + p * each, *peak = mine + rows * dv, *total = peak + rows;
        const float *own = scaled + (b * groups + g) * query;
        float *scratch = total + rows * LANES;
#define CASE(t) case t: \
        if (wide) part_wide(own, k, v, pages, b, g, first, last, (int)rows, mine, peak, total, scratch, t); \
        else part(own, k, v, pages, b, g, first, last, (int)rows, mine, peak, total, scratch, t); break;
        switch (type) { CASE(FP32) CASE(FP16) CASE(BF16) CASE(INT8) CASE(FP8) }
    }
    for (int64_t pair = 0, before = 0; pair < batch * groups; pair++) {
        int64_t end = before + splits_of(tokens[pair / groups], length);
        for (int64_t r = 0; r < rows; r++) {
            float most = -INFINITY, sum = 0, *to = out + (pair * rows + r) * v->width;
            for (int64_t p = before; p < end; p++)
                most = fmaxf(most, partial[p * each + rows * dv + r]);
            memset(to, 0, v->width * sizeof(float));
            for (int64_t p = before; p < end; p++) {
                const float *from = partial + p * each;
                /* The weight is 0 for a part without tokens. A NaN in a part must still reach the sums. */
                float weight = expf(from[rows * dv + r] - most);
                for (int l = 0; l < LANES; l++)
                    sum += weight * from[rows * (dv + 1) + r * LANES + l];
                int64_t i = 0;
                for (; i + LANES <= v->width; i += LANES)
                    *(vec_u *)(to + i) += *(const vec_u *)(from + r * dv + i) * weight;
                for (; i < v->width; i++)
                    to[i] += weight * from[r * dv + i];
            }
            for (int64_t i = 0; i < v->width; i++)
                to[i] /= sum;
        }
        before = end;
    }
}
