/* What becomes of a token that goes, see `Merged` in step/native.py. */
#include "step.h"

typedef struct {
  float like; /* cosine; -2: there is none */
  int64_t slot;
} Mate;

/* A key as floats, in the order in which `channels` reads another. Returns its length. */
static float laid_out(const char *p, int64_t dim, int64_t dtype, float *key) {
  const int64_t whole = dim / PAIRED * PAIRED;
  float norm = 0;
  for (int64_t d = 0; d < dim; d++) {
    const float x = number(p, d, dtype);
    const int64_t sorted = d / PAIRED * PAIRED + (d & 1) * LANES + d % PAIRED / 2;
    key[dtype == F32 || d >= whole ? d : sorted] = x;
    norm += x * x;
  }
  return sqrtf(norm) > 1e-12f ? sqrtf(norm) : 1e-12f;
}

/* The products of a token's key with `key`, and with itself. */
INLINE void products(const char *at, const float *key, int64_t dim, int64_t dtype, vf *with, vf *own) {
  vf a = {0}, b = {0}, c = {0}, e = {0};
  int64_t d = 0;
  for (; d + PAIRED <= dim; d += PAIRED) {
    const vf x = channels(at, d, 0, dtype), y = channels(at, d, 1, dtype);
    a += x * load(key + d);
    b += y * load(key + d + LANES);
    c += x * x;
    e += y * y;
  }
  for (; d < dim; d++) {
    const float one = number(at, d, dtype);
    a[0] += one * key[d];
    c[0] += one * one;
  }
  *with = a + b;
  *own = c + e;
}

/* The token of a row whose key is most like `key`; the earlier of two that are as like. */
INLINE Mate nearest_as(const Step *s, int64_t row, int64_t columns, const float *key, float length, int64_t dtype) {
  const int32_t *position = s->position + row * s->slots + s->start;
  const int32_t first = s->spares && s->first ? position_at(s->first[row]) : 0;
  const int64_t size = s->dim * (dtype == F32 ? 4 : 2);
  const char *from = s->keys + (row * s->slots + s->start) * size;
  Mate best = {-2, -1};
  for (int64_t c = 0; c < columns; c += LANES) {
    vf with[LANES], own[LANES];
    float like[LANES], norm[LANES];
    for (int t = 0; t < LANES; t++) {
      const int64_t slot = c + t < columns ? c + t : columns - 1; /* computed with, never seen */
      products(from + slot * size, key, s->dim, dtype, with + t, own + t);
    }
    store(like, sums(with));
    store(norm, sums(own));
    for (int t = 0; t < LANES; t++) {
      const float mine = sqrtf(norm[t]);
      like[t] /= (mine > 1e-12f ? mine : 1e-12f) * length;
    }
    for (int t = 0; t < LANES && c + t < columns; t++)
      if (like[t] >= best.like && position[c + t] >= first)
        if (like[t] > best.like || position[c + t] < position[best.slot]) best = (Mate){like[t], c + t};
  }
  return best;
}

/* x <- (own x + weight y) / (own + part) */
static void blend(char *x, const char *y, int64_t dim, int64_t dtype, float own, float weight, float part) {
  for (int64_t d = 0; d < dim; d++)
    put(x, d, dtype, (number(x, d, dtype) * own + number(y, d, dtype) * weight) / (own + part));
}

/* The token that was in slot `lost` goes into the one that is most like it, if that is as like as the row's threshold,
   which moves on. What is in the slot itself stays as it is. */
void merge_away(const Step *s, int64_t row, int64_t lost, int64_t columns) {
  const int64_t dim = s->dim, dtype = s->dtype, size = dtype == F32 ? 4 : 2, from = row * s->slots + s->start;
  const char *gone = s->keys + (from + lost) * dim * size;
  float key[dim];
  const float length = laid_out(gone, dim, dtype, key);
  const Mate to = dtype == F32 ? nearest_as(s, row, columns, key, length, F32)
                               : nearest_as(s, row, columns, key, length, BF16);
  if (to.slot < 0) return;
  const float before = s->threshold[row];
  const float after = before != before ? to.like : s->beta * to.like + (1 - s->beta) * before;
  s->threshold[row] = after;
  if (to.like < after) return;
  const float own = s->shrinks ? 1 : (float)M_E, weight = s->shrinks ? to.like : expf(to.like);
  const float part = s->shrinks ? 1 : weight;
  blend(s->keys + (from + to.slot) * dim * size, gone, dim, dtype, own, weight, part);
  const int64_t wide = s->dim_v * size;
  blend(s->values + (from + to.slot) * wide, s->values + (from + lost) * wide, s->dim_v, dtype, own, weight, part);
}
