/* Attention to codes of 2, 4 and 8 bits by products of pairs of bfloat16 or of whole numbers, where the processor has these:
   AVX512-BF16, and AVX512-VNNI for 8 bits, in one code or in two nibbles (pairs.c); or AVX2 alone (whole.c). */
#ifndef KVENGINE_PAIRS_H
#define KVENGINE_PAIRS_H

#include "codes.h"

#if HALVES && defined(__AVX512VNNI__)
#define BYTES 1
#else
#define BYTES 0
#endif

#define NIBBLE_STEP (1.0f / 16) /* what a byte of two nibbles counts, of the upper one's step */
#define NIBBLE_ZERO 8           /* and which byte stands for 0 */

#if WHOLE
/* The queries for keys of one width, as they are given and with their channels in the order of the codes. */
typedef struct {
  const float *given;
  float q[CODED_QUERIES * 256] __attribute__((aligned(32)));
  int16_t part[CODED_QUERIES * 256] __attribute__((aligned(32))); /* times the scales of a key group, in units */
  float add[2 * CODED_QUERIES], unit[2 * CODED_QUERIES];         /* of every score, twice each: tokens come by two */
} Queries;

/* What a task keeps. */
typedef struct {
  Queries keys[2];         /* of mixed pages, each width has its own */
  int64_t from[2], to[2];  /* the tokens of each one's key group that was read last */
  int32_t group[16][LANES]; /* of the values' registers */
  int16_t channel[256];    /* what the numbers of a result are of */
  float factor[2][256];    /* of a mixed page's channels, for either width */
  int64_t page[2];         /* whose they are */
} Pairs;
#else
/* The queries for keys of one width: a row's pairs of channels, which stand in the order of `products`. */
typedef struct {
  float q[CODED_QUERIES * 256] __attribute__((aligned(64)));
  uint16_t order[PAIRED];                                          /* channels of 32 in the order of pairs */
  uint32_t part[CODED_QUERIES * 128] __attribute__((aligned(64))); /* times the scales of a key group, rounded */
  float add[CODED_QUERIES], unit[CODED_QUERIES];                   /* a term of every score; what whole numbers count */
} Queries;

/* What a task keeps. */
typedef struct {
  Queries keys[2];                 /* of mixed pages, each width has its own */
  int64_t from[2], to[2];          /* the tokens of each one's key group that was read last */
  uint16_t order[PAIRED];          /* values: scales of some tokens as [group, token] */
  uint16_t two[PAIRED];            /* and of those as [two tokens, group] */
  uint16_t half[2][PAIRED];        /* half words of two tokens side by side */
  int32_t turn[LANES], group[8][LANES]; /* lanes by group; a register's groups */
  int16_t channel[256];            /* what the numbers of a result are of */
  float factor[2][256];            /* of a mixed page's channels, for either width */
  int64_t page[2];                 /* whose they are */
} Pairs;
#endif

/* A mixed page's factors for its channels, in the order of a result; kept until another page comes. */
INLINE const float *factors_of(const Field *v, int64_t page, int narrow, Pairs *x) {
  float *factor = x->factor[narrow], each[256];
  if (page == x->page[narrow]) return factor;
  widen_run(v->channel, page * v->dim, v->dim, v->dtype, each);
  for (int64_t i = 0; i < v->dim; i++) factor[i] = each[x->channel[i]];
  x->page[narrow] = page;
  return factor;
}

/* The weights of `run` of a batch's `count` tokens, from number `t` on, and zeros behind them. */
INLINE const float *weights_of(const float *p, int64_t rows, int t, int run, int count, float *room) {
  if (run == count) return p;
  for (int64_t r = 0; r < rows; r++) {
    memcpy(room + r * TILE, p + r * TILE + t, sizeof(float) * run);
    memset(room + r * TILE + run, 0, sizeof(float) * (TILE - run));
  }
  return room;
}

INLINE void add_times(const float *sums, const float *factor, int64_t rows, int64_t dim, float *out) {
  for (int64_t r = 0; r < rows; r++, sums += dim, out += dim)
    for (int64_t d = 0; d < dim; d += LANES) store(out + d, load(out + d) + load(sums + d) * load(factor + d));
}

int pairs_fit(const Field *f, int64_t dim, int64_t rows);
void pairs_keys(const Field *k, const float *q, int64_t rows, Pairs *x); /* before the first batch */
void pairs_values(const Field *v, Pairs *x);
void pairs_dots(const Field *k, int64_t rows, const Tokens *tokens, Pairs *x, float *scores);
void pairs_weigh(const Field *v, const float *p, int64_t rows, const Tokens *tokens, Pairs *x, float *out);
void pairs_unsort(const Field *v, const Pairs *x, float *out, int64_t rows);

#endif
