/* past.h - what a rank has done to a model's parameters, as ranks compare it, and what they say of it.
 *
 * The one idea: a few numbers travel wherever ranks meet anyway, in a round of gradients or before a forward. Only where they
 * differ do ranks look for words, which each keeps at hand: what it has set, written, or failed in.
 */
#ifndef ZS_PAST_H
#define ZS_PAST_H

#include "base/status.h"

#include <stddef.h>

typedef struct zs_comm zs_comm;

/* Sums over models, where a transport has several. */
typedef struct zs_past {
    uint64_t steps; /* optimizer steps, counted */
    /* Digests of the optimizers' param groups at the last steps, of numbers rounded in two ways: numbers that differ by less
     * than 5e-7 of themselves agree in one of them, such that differ by more than 1e-6 in none. */
    uint64_t settings[2];
    uint64_t loads, thaws, writes; /* digests: what was loaded, unfrozen, and written in place */
} zs_past;

/* How long that is. */
enum { ZS_PAST_WORDS = sizeof(zs_past) / sizeof(uint64_t) };

/* Have two ranks done the same? Ranks are compared with rank 0, so that all come to the same answer: of three, each two may be
 * alike but for the first and the last. */
bool zs_past_alike(const zs_past *a, const zs_past *b);

/* *past += now - before. */
void zs_past_replace(zs_past *past, const zs_past *before, const zs_past *now);

/* What a rank has words for. */
typedef enum zs_topic {
    ZS_ON_MISHAP,   /* what has failed lately, as a clause that goes on "rank 0 "; "": nothing */
    ZS_ON_WRITE,    /* what was written in place last, likewise */
    ZS_ON_SETTINGS, /* the param groups: lines of a name, a tab, and values */
    ZS_TOPICS
} zs_topic;

/* The longest text on a topic. */
enum { ZS_WORDS = 1024 };

/* Each text of a rank, by topic. */
typedef char zs_words[ZS_TOPICS][ZS_WORDS];

/* Tells the peers. Never waits. */
void zs_comm_tell(zs_comm *comm, zs_topic topic, const char *text);

/* "; rank 0 raised ..." for all ranks that have told of a mishap, as far as this one knows; "" if none has. */
void zs_comm_mishaps(const zs_comm *comm, char *text, size_t size);

/* What rank 0 has done, and `other`. */
typedef struct zs_pasts {
    const zs_past *first, *second;
    int other;
} zs_pasts;

/* ZS_ERR_DIVERGED if they are not alike. */
zs_status zs_comm_check_pasts(zs_comm *comm, const zs_pasts *pasts);

/* This rank has come to its orderly end. The last to do so finds whether what all have done since they met last is alike:
 * ZS_ERR_DIVERGED; but for loads and unfreezing, after which nothing came, and not if that has been an error since. Waits for
 * nobody. */
zs_status zs_comm_end(zs_comm *comm);

#endif
