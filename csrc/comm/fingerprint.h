/* fingerprint.h - a rank's changes to a model's parameters: numbers that ranks compare, and texts for messages.
 *
 * A few numbers travel whenever ranks communicate anyway, in a round of gradients or before a forward. Only if they
 * differ do ranks read the texts, which each rank keeps ready: its settings, last write, and failure. */
#ifndef ZS_FINGERPRINT_H
#define ZS_FINGERPRINT_H

#include "base/status.h"
#include "comm/script.h"

#include <stddef.h>

typedef struct zs_comm zs_comm;

/* Sums over models, where a transport has several. */
typedef struct zs_fingerprint {
    uint64_t steps;                 /* optimizer steps, counted */
    uint64_t settings;              /* a digest of the param groups at the last of them */
    uint64_t counts;                /* the step count in the optimizer's state at that time */
    uint64_t loads, frozen, writes; /* digests of loads, of frozen parameters, and of in-place writes to parameters */
    uint64_t draws;                 /* a digest of random draws into parameters, and of writes to full ones */
    uint64_t grads;                 /* a digest of in-place writes to gradients; compared with gradients only */
} zs_fingerprint;

/* Its length. */
enum { ZS_FINGERPRINT_WORDS = sizeof(zs_fingerprint) / sizeof(uint64_t) };

/* *past += now - before. */
void zs_fingerprint_replace(zs_fingerprint *fingerprint, const zs_fingerprint *before, const zs_fingerprint *now);

/* Subjects of a rank's texts. */
typedef enum zs_topic {
    ZS_ON_FAILURE,  /* the failure since the ranks last met, as a clause that continues "rank 0 "; "": none */
    ZS_ON_WRITE,    /* the last in-place write to the model that communicates, such as "mul_() on 'weight'" */
    ZS_ON_SETTINGS, /* the param groups: lines of a name, a tab, and values with commas between them */
} zs_topic;

/* All texts of a rank, and with them where its script is, see where.h. They fit into one exchange. */
typedef struct zs_diagnostics {
    char failure[512], write[256], where[ZS_WHERE], settings[2752];
} zs_diagnostics;

/* The text on a topic in `texts`. */
const char *zs_diagnostics_on(const zs_diagnostics *texts, zs_topic topic);

/* Replaces it; truncates a text that is too long. */
void zs_diagnostics_set(zs_diagnostics *texts, zs_topic topic, const char *text);

/* Publishes a text to the peers. Never waits. */
void zs_comm_publish(zs_comm *comm, zs_topic topic, const char *text);

/* The size of the text of zs_comm_failures. */
enum { ZS_FAILURES = 1024 };

/* "; rank 0 raised ..." for each rank whose failure this rank knows; "" if there is none, or all have the same. */
void zs_comm_failures(const zs_comm *comm, char *text, size_t size);

/* Sets the peers' texts where a transport got them in another way: [world], *steals*; NULL: forgets them. */
void zs_comm_set_others(zs_comm *comm, zs_diagnostics *others);

/* Have all ranks done the same, according to `fingerprints` [world]? Else ZS_ERR_DIVERGED, the same on all ranks.
 * Numbers in param groups may differ by 1e-6 of their value; a rank that lacks the texts leaves this check to those
 * that have them. */
zs_status zs_comm_check_fingerprints(zs_comm *comm, const zs_fingerprint *fingerprints);

/* The same, found by a rank that may read alone. */
zs_status zs_comm_check_look(zs_comm *comm, const zs_fingerprint *fingerprints);

/* The same if all ranks have `fingerprints` at the same time: if these differ, they exchange texts first.
 * Collective. */
zs_status zs_comm_compare_fingerprints(zs_comm *comm, const zs_fingerprint *fingerprints);

/* This rank ends in an orderly way. The last rank to do so checks that all did the same since their last collective:
 * ZS_ERR_DIVERGED; not if they have loaded since, or if the difference was already reported. Never waits. */
zs_status zs_comm_end(zs_comm *comm);

#endif
