/* Attention to codes as they lie: no vector of floats is made of them. */
#ifndef KVENGINE_CODES_H
#define KVENGINE_CODES_H

#include "fields.h"

#define CODED_QUERIES 16 /* rows up to which reading codes again for every four rows is cheaper than a tile of floats */

/* The scaled queries of the key group that was read last. */
typedef struct {
  int64_t from, to; /* its tokens */
  float q[CODED_QUERIES * 256], add[CODED_QUERIES];
} KeyGroup;

int codes_lie(const Field *f, int64_t dim, int64_t rows);
int mixed_lie(const Field *f, int64_t dim, int64_t rows);
void sort_channels(const Field *f, const float *x, int64_t rows, float *out);
void unsort_channels(const Field *f, float *x, int64_t rows);
void dots_codes(const Field *f, KeyGroup *g, const float *q, const float *sorted, int64_t rows, const Tokens *x,
                float *scores);
void dots_mixed(const Field *f, KeyGroup g[2], const float *q, const float *sorted, int64_t rows, const Tokens *x,
                float *scores);
void weigh_mixed(const Field *f, const float *p, int64_t rows, const Tokens *x, float *out);
void weigh_codes(const Field *f, const float *p, int64_t rows, const Tokens *x, float *out);
int of_page(const Field *f, const Tokens *x, int t, int64_t *page);

#endif
