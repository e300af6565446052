/* Attention to TurboQuant's codes: levels of turned vectors, found in a table of 16 that lies in a register. */
#ifndef KVENGINE_TURNED_H
#define KVENGINE_TURNED_H

#include "codes.h"

/* What a task keeps: the queries in the order of the keys' codes, as floats or as pairs of bfloat16. */
typedef struct {
  float q[CODED_QUERIES * 256] __attribute__((aligned(64)));
  uint16_t pairs[CODED_QUERIES * 256] __attribute__((aligned(64)));
  int k_halves, v_halves; /* whether keys, values are multiplied as bfloat16 */
} Turned;

void turn_rows(const Field *f, const float *x, int64_t rows, int64_t stride, float *out); /* out[n] = R x[n] */
int turned_lie(const Field *f, int64_t dim, int64_t rows);
void turned_open(const Field *k, const Field *v, const float *q, int64_t rows, int halves, Turned *x);
void turned_dots(const Field *k, int64_t rows, const Tokens *tokens, const Turned *x, float *scores);
void turned_weigh(const Field *v, const float *p, int64_t rows, const Tokens *tokens, const Turned *x, float *out);
void turned_unsort(const Field *v, const Turned *x, float *out, int64_t rows);

#endif
