/* fingerprint.h - what a rank has done to a model's parameters, as ranks compare it, and what they say of it.
 *
 * A few numbers travel wherever ranks meet anyway, in a round of gradients or before a forward. Only where they
 * differ do ranks look for words, which each keeps at hand: what it has set, written, or failed in.
 */
#ifndef ZS_FINGERPRINT_H
#define ZS_FINGERPRINT_H

#include "base/status.h"

#include <stddef.h>

typedef struct zs_comm zs_comm;

/* Sums over models, where a transport has several. */
typedef struct zs_fingerprint {
    uint64_t steps;                 /* optimizer steps, counted */
    uint64_t settings;              /* a digest of the param groups at the last of them */
    uint64_t counts;                /* the step count in the optimizer's state at that time */
    uint64_t loads, frozen, writes; /* digests: what was loaded, is frozen, and was written in place to parameters */
    uint64_t draws;                 /* a digest of what was drawn for parameters in place or written to full ones */
    uint64_t grads;                 /* ... and to gradients; compared with gradients only */
} zs_fingerprint;

/* How long that is. */
enum { ZS_FINGERPRINT_WORDS = sizeof(zs_fingerprint) / sizeof(uint64_t) };

/* *past += now - before. */
void zs_fingerprint_replace(zs_fingerprint *fingerprint, const zs_fingerprint *before, const zs_fingerprint *now);

/* What a rank has words for. */
typedef enum zs_topic {
    ZS_ON_FAILURE,  /* what has failed lately, as a clause that goes on "rank 0 "; "": nothing */
    ZS_ON_WRITE,    /* what was written in place last, such as "mul_() on 'weight'"; "": nothing */
    ZS_ON_SETTINGS, /* the param groups: lines of a name, a tab, and values with commas between them */
} zs_topic;

/* Each text of a rank. It fits into one exchange. */
typedef struct zs_diagnostics {
    char failure[512], write[256], settings[3072];
} zs_diagnostics;

/* A text on a topic in `words`. */
const char *zs_diagnostics_on(const zs_diagnostics *words, zs_topic topic);

/* Replaces it; what is too long is cut off. */
void zs_diagnostics_set(zs_diagnostics *words, zs_topic topic, const char *text);

/* Shows a text to the peers. Never waits. */
void zs_comm_publish(zs_comm *comm, zs_topic topic, const char *text);

/* Room for what that tells. */
enum { ZS_FAILURES = 1024 };

/* "; rank 0 raised ..." for each rank whose failure this one knows of; "" if there is none. */
void zs_comm_failures(const zs_comm *comm, char *text, size_t size);

/* The same words, as a transport has got them otherwise: [world], taken over; NULL: none are known any more. */
void zs_comm_set_others(zs_comm *comm, zs_diagnostics *others);

/* Have all ranks done the same, as `fingerprints` [world] say? Else ZS_ERR_DIVERGED, with the same answer on all
 * ranks. Numbers in param groups may differ by 1e-6 of their value; where words are not known that is left to
 * whoever knows them. */
zs_status zs_comm_check_fingerprints(zs_comm *comm, const zs_fingerprint *fingerprints);

/* The same where all ranks have `fingerprints` at hand at the same time: they exchange words first, if fingerprints
 * differ. Collective. */
zs_status zs_comm_compare_fingerprints(zs_comm *comm, const zs_fingerprint *fingerprints);

/* This rank has come to its orderly end. The last to do so finds whether what all have done since they met last is
 * alike: ZS_ERR_DIVERGED; not if they have loaded since, or if it has been an error already. Waits for nobody. */
zs_status zs_comm_end(zs_comm *comm);

#endif
