/* One decoded token, and the verdict that follows it. Mirrored in step/native.py. */
#ifndef KVENGINE_STEP_H
#define KVENGINE_STEP_H

#include "attention.h"

typedef struct {
  int64_t rows, group, dim, dim_v, dtype, slots, start, end, at, holes, threads, fill;
  float scale;
  const char *q, *k, *v;
  char *keys, *values;
  int32_t *position;
  char *out;
  const int64_t *first, *recent; /* [row] or NULL */
  const Attention *far;          /* sealed pages: their fields and columns; the rest is filled in here. Or NULL */
  const int64_t *budget, *place; /* [row] or NULL */
  float *score;                  /* [row, slot] or NULL */
  float *threshold;              /* [row] or NULL */
  int64_t adds, together, most, shrinks, spares;
  float part, beta;
  int32_t *sealed; /* positions of sealed tokens [row, sealed_row], for `first` and `recent` to judge as well; or NULL */
  uint8_t *alive;  /* [row, alive_row]: whether any of `unit` of them stays */
  int64_t sealed_row, alive_row, units, unit;
} Step;

/* A number of an array of floats or bfloat16. */
INLINE float number(const char *p, int64_t i, int64_t dtype) {
  return dtype == F32 ? ((const float *)p)[i] : bf16_value(((const uint16_t *)p)[i]);
}

INLINE void put(char *p, int64_t i, int64_t dtype, float x) {
  if (dtype == F32) {
    ((float *)p)[i] = x;
    return;
  }
  uint32_t bits;
  memcpy(&bits, &x, 4);
  ((uint16_t *)p)[i] = x != x ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16); /* ties to even */
}

/* A bound of positions, which may be beyond all of them. */
INLINE int32_t position_at(int64_t x) { return (int32_t)(x < INT32_MIN ? INT32_MIN : x > INT32_MAX ? INT32_MAX : x); }

void payments(const Step *s, const float *logits, const float *lse, int64_t columns, int64_t wide, int64_t threads,
              float *paid);
int64_t judge(const Step *s, int64_t row, int64_t columns, float *paid);
void judge_places(const Step *s, int64_t row, int64_t columns);
void judge_ends(const Step *s, int64_t row, int64_t columns);
void judge_sealed(const Step *s, int64_t row);
void merge_away(const Step *s, int64_t row, int64_t lost, int64_t columns);

#endif
