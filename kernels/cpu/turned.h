/* Attention to TurboQuant's codes: levels of turned vectors, found in a table of 16 that lies in a register. */
#ifndef KVENGINE_TURNED_H
#define KVENGINE_TURNED_H

#include "pairs.h"

/* Levels as whole numbers in units: their lower and their upper bytes. */
typedef struct {
  uint8_t low[16] __attribute__((aligned(16))), high[16] __attribute__((aligned(16)));
  float unit;
} LevelBytes;

/* What a task keeps: the queries in the order of the keys' codes, as floats, as pairs of bfloat16 or as whole numbers. */
typedef struct {
  float q[CODED_QUERIES * 256] __attribute__((aligned(64)));
  union {
    uint16_t pairs[CODED_QUERIES * 256] __attribute__((aligned(64)));
    int16_t whole[CODED_QUERIES * 256] __attribute__((aligned(64)));
  };
  int k_halves, v_halves; /* whether keys, values are multiplied as bfloat16, or as whole numbers */
#if WHOLE
  float unit[2 * CODED_QUERIES]; /* of every score, twice each: tokens come by two */
  LevelBytes k_levels, v_levels;
#endif
} Turned;

void turn_rows(const Field *f, const float *x, int64_t rows, int64_t stride, float *out); /* out[n] = R x[n] */
int turned_lie(const Field *f, int64_t dim, int64_t rows);
void turned_open(const Field *k, const Field *v, const float *q, int64_t rows, int halves, Turned *x);
void turned_dots(const Field *k, int64_t rows, const Tokens *tokens, const Turned *x, float *scores);
void turned_weigh(const Field *v, const float *p, int64_t rows, const Tokens *tokens, const Turned *x, float *out);
void turned_unsort(const Field *v, const Turned *x, float *out, int64_t rows);

#if WHOLE
int whole_turned_lie(const Field *f);
void whole_turned_keys(const Field *k, const float *q, int64_t rows, Turned *x);
void whole_turned_values(const Field *v, Turned *x);
void whole_turned_dots(const Field *k, int64_t rows, const uint8_t *const *at, const float *scale, int count, const Turned *x,
                       float *scores);
void whole_turned_weigh(const Field *v, const float *w, int64_t rows, const uint8_t *const *at, int count, const Turned *x,
                        float *out);
int64_t whole_turned_channel(const Field *v, int64_t i);
#endif

#endif
