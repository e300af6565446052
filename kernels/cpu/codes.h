/* Attention to codes as they lie: no vector of floats is made of them. */
#ifndef KVENGINE_CODES_H
#define KVENGINE_CODES_H

#include "fields.h"

#define CODED_QUERIES 16 /* rows up to which reading codes again for every four rows is cheaper than a tile of floats */

/* The scaled queries of the key group that was read last. */
typedef struct {
  int64_t from, to;     /* its tokens */
  uint8_t channel[256]; /* the order of the codes */
  float q[CODED_QUERIES * 256] __attribute__((aligned(64))), add[CODED_QUERIES];
} KeyGroup;

/* Whether nibbles refine the codes; those of a mixed page's other tokens do not. */
INLINE int refined(const Field *f) { return f->low && f->layout != MIXED; }

int codes_lie(const Field *f, int64_t dim, int64_t rows);
int mixed_lie(const Field *f, int64_t dim, int64_t rows);
void open_codes(const Field *f, KeyGroup g[2]);
void sort_channels(const Field *f, const float *x, int64_t rows, float *out);
void unsort_channels(const Field *f, float *x, int64_t rows);
void dots_codes(const Field *f, KeyGroup *g, const float *q, const float *sorted, int64_t rows, const Tokens *x,
                float *scores);
void dots_mixed(const Field *f, KeyGroup g[2], const float *q, const float *sorted, int64_t rows, const Tokens *x,
                float *scores);
void weigh_mixed(const Field *f, const float *p, int64_t rows, const Tokens *x, float *out);
void weigh_codes(const Field *f, const float *p, int64_t rows, const Tokens *x, float *out);
void token_ranges(const Field *f, const int64_t *token, int count, int64_t each, float *scale, float *zero);
void slot_ranges(const Field *f, const int64_t *token, int count, float *scale, float *zero);
int of_page(const Field *f, const Tokens *x, int t, int64_t *page);

/* 8 codes of 2 bits in each half word become the upper halves of a word's 8 nibbles, and `rest` their lower ones: 4 code
   + rest of 16, so 1 + code / 4 all the same, if there is no rest. */
INLINE void widen_codes(const uint8_t *from, int64_t dim, uint32_t rest, uint8_t *to) {
  for (; dim; dim -= 8 * LANES, from += 2 * LANES, to += 4 * LANES) {
    vu x = words_of((const uint16_t *)from);
    x = (x | x << 8) & 0x00ff00ffu;
    x = (x | x << 4) & 0x0f0f0f0fu;
    *(vu *)to = ((x | x << 2) & 0x33333333u) << 2 | rest * 0x11111111u;
  }
}

/* A mixed page's token's codes: as they lie, or widened into `room`. */
INLINE const uint8_t *codes_of(const Field *f, const Tokens *x, int t, uint32_t rest, uint8_t *room) {
  if (!x->narrow) return (const uint8_t *)f->data + x->index[t] * (f->dim / 2);
  widen_codes((const uint8_t *)f->low + x->index[t] * (f->dim / 4), f->dim, rest, room);
  return room;
}

#endif
