/* Keys rebuilt from a low-rank factor and turned at their places (ShadowKV): U[place] @ basis, then the rotation.

   Of the field, `data` is U [sequence, place, rank], `group` the rows of a sequence, `token_stride` the rank, `scale` the basis
   [row, rank, dim] of dtype `page`, `zero` the `bits` frequencies, which are floats.
   U and basis that are bfloat16 are multiplied as they are, two of the rank at a time, where the processor can; the products of
   such are exact. */
#include "fields.h"

#define ROWS (2 * ACROSS)

/* Sine and cosine to about 1e-7, for |x| up to 1e5: the nearest multiple of pi / 2 is taken off in three parts. */
INLINE void turn(vf x, vf *sine, vf *cosine) {
  vf shifted = x * 0.636619772f + 12582912.0f, n = shifted - 12582912.0f;
  vi quarter = __builtin_convertvector(n, vi);
  vf r = ((x - n * 1.5703125f) - n * 4.837512969970703125e-4f) - n * 7.549789948768648e-8f, z = r * r;
  vf s = r + r * z * (-1.6666654611e-1f + z * (8.3321608736e-3f - z * 1.9515295891e-4f));
  vf c = 1 - z * 0.5f + z * z * (4.166664568298827e-2f + z * (-1.388731625493765e-3f + z * 2.443315711809948e-5f));
  vi odd = (quarter & 1) != 0;
  vf a = choose(odd, c, s), b = choose(odd, s, c);
  *sine = choose((quarter & 2) != 0, -a, a);
  *cosine = choose(((quarter + 1) & 2) != 0, -b, b);
}

/* A row of U: floats, or two numbers of 16 bits in each word. */
typedef union { const float *floats; const uint16_t *halves; } Row;

/* The registers of a basis's channels from `d` on and from `e` on, side by side: where they lie, rows that are a power of two
   of bytes apart push each other out of the first-level cache. */
static void lay_panel(const Field *f, int64_t row, int64_t d, int64_t e, float *panel) {
  const int64_t rank = f->token_stride;
  for (int64_t r = row * rank; r < (row + 1) * rank; r++, panel += 2 * LANES) {
    store(panel, numbers(f->scale, r * f->dim + d, f->page));
    store(panel + LANES, numbers(f->scale, r * f->dim + e, f->page));
  }
}

/* U @ panel for ROWS tokens. */
INLINE void rebuild(const Row *u, const float *panel, int64_t rank, vf *one, vf *other) {
  vf a[ROWS] = {{0}}, b[ROWS] = {{0}};
  for (int64_t r = 0; r < rank; r++) {
    vf x = load(panel + 2 * r * LANES), y = load(panel + 2 * r * LANES + LANES);
    KEEP(x);
    KEEP(y);
#pragma GCC unroll 8
    for (int j = 0; j < ROWS; j++) {
      a[j] += x * u[j].floats[r];
      b[j] += y * u[j].floats[r];
    }
  }
  for (int j = 0; j < ROWS; j++) one[j] = a[j], other[j] = b[j];
}

#if HALVES
INLINE int in_pairs(const Field *f) { return f->dtype == BF16 && f->page == BF16 && f->token_stride % 2 == 0; }

/* A register of two rows: in every lane, the first one's number below the second one's. */
INLINE __m512i two_rows(const uint16_t *first, int64_t dim) {
  const __m512i x = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)first));
  const __m512i y = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(first + dim)));
  return _mm512_or_si512(x, _mm512_slli_epi32(y, 16));
}

static void lay_pairs(const Field *f, int64_t row, int64_t d, int64_t e, float *panel) {
  const uint16_t *basis = (const uint16_t *)f->scale + row * f->token_stride * f->dim;
  for (int64_t r = 0; r < f->token_stride; r += 2, basis += 2 * f->dim, panel += 2 * LANES) {
    _mm512_store_si512(panel, two_rows(basis + d, f->dim));
    _mm512_store_si512(panel + LANES, two_rows(basis + e, f->dim));
  }
}

INLINE void rebuild_pairs(const Row *u, const float *panel, int64_t rank, vf *one, vf *other) {
  __m512 a[ROWS], b[ROWS];
  for (int j = 0; j < ROWS; j++) a[j] = b[j] = _mm512_setzero_ps();
  for (int64_t r = 0; r < rank / 2; r++) {
    const __m512bh x = (__m512bh)load(panel + 2 * r * LANES), y = (__m512bh)load(panel + 2 * r * LANES + LANES);
#pragma GCC unroll 8
    for (int j = 0; j < ROWS; j++) {
      int32_t two;
      memcpy(&two, u[j].halves + 2 * r, sizeof two);
      const __m512bh pair = (__m512bh)_mm512_set1_epi32(two);
      a[j] = _mm512_dpbf16_ps(a[j], x, pair);
      b[j] = _mm512_dpbf16_ps(b[j], y, pair);
    }
  }
  for (int j = 0; j < ROWS; j++) one[j] = (vf)a[j], other[j] = (vf)b[j];
}
#else
INLINE int in_pairs(const Field *f) { return (void)f, 0; }
static void lay_pairs(const Field *f, int64_t row, int64_t d, int64_t e, float *panel) { lay_panel(f, row, d, e, panel); }
INLINE void rebuild_pairs(const Row *u, const float *panel, int64_t rank, vf *one, vf *other) {
  rebuild(u, panel, rank, one, other);
}
#endif

/* Turn a key whose halves are no whole registers. */
static void turn_key(const float *frequency, int64_t half, float place, float factor, float *key) {
  float sine[256 + LANES], cosine[256 + LANES];
  for (int64_t d = 0; d < half; d += LANES) {
    vf s, c;
    turn(place * load(frequency + d), &s, &c);
    store(sine + d, s * factor);
    store(cosine + d, c * factor);
  }
  for (int64_t d = 0; d < half; d++) {
    float a = key[d], b = key[d + half];
    key[d] = a * cosine[d] - b * sine[d];
    key[d + half] = b * cosine[d] + a * sine[d];
  }
}

INLINE void read_as(const Field *f, int64_t row, const int64_t *place, int count, float *tile, int64_t stride, int pairs) {
  const int64_t rank = f->token_stride, dim = f->dim, half = f->bits, first = row / f->group * f->row_stride;
  const int64_t paired = half % LANES ? 0 : half; /* channels whose partners are in a register of their own */
  const int64_t step = rank + LANES;
  const float factor = (float)f->factor;
  Row u[BATCH + ROWS];
  float wide[f->dtype == F32 || pairs ? 1 : BATCH * step], panel[2 * LANES * rank] __attribute__((aligned(64)));
  float frequency[256 + LANES] = {0};
  vf a[ROWS], b[ROWS];
  memcpy(frequency, f->zero, half * sizeof(float));
  for (int i = 0; i < count; i++) {
    const int64_t at = first + place[i] * rank;
    if (pairs) u[i].halves = (const uint16_t *)f->data + at;
    else if (f->dtype == F32) u[i].floats = (const float *)f->data + at;
    else widen_run(f->data, at, rank, f->dtype, wide + i * step), u[i].floats = wide + i * step;
  }
  for (int i = count; i < count + ROWS; i++) u[i] = u[0];
  for (int64_t d = 0; d < paired; d += LANES) {
    (pairs ? lay_pairs : lay_panel)(f, row, d, d + half, panel);
    for (int i = 0; i < count; i += ROWS) {
      (pairs ? rebuild_pairs : rebuild)(u + i, panel, rank, a, b);
      for (int j = 0; j < ROWS && i + j < count; j++) {
        float *key = tile + (i + j) * stride + d;
        vf s, c;
        turn((float)place[i + j] * load(frequency + d), &s, &c);
        s *= factor;
        c *= factor;
        store(key, a[j] * c - b[j] * s);
        store(key + half, b[j] * c + a[j] * s);
      }
    }
  }
  for (int64_t d = 2 * paired; d < dim; d += 2 * LANES) {
    const int64_t e = d + LANES < dim ? d + LANES : d;
    (pairs ? lay_pairs : lay_panel)(f, row, d, e, panel);
    for (int i = 0; i < count; i += ROWS) {
      (pairs ? rebuild_pairs : rebuild)(u + i, panel, rank, a, b);
      for (int j = 0; j < ROWS && i + j < count; j++) {
        store(tile + (i + j) * stride + d, a[j]);
        store(tile + (i + j) * stride + e, b[j]);
      }
    }
  }
  for (int i = 0; i < count && !paired; i++) turn_key(frequency, half, (float)place[i], factor, tile + i * stride);
}

void read_lowrank(const Field *f, int64_t row, const int64_t *place, int count, float *tile, int64_t stride) {
  if (in_pairs(f)) read_as(f, row, place, count, tile, stride, 1);
  else read_as(f, row, place, count, tile, stride, 0);
}
