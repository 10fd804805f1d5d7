/* kin.h - which ranks are processes on this host, and which of them have ended.
 *
 * The one idea: a pidfd stands for one process for ever, while its number may become another's; it becomes readable when the
 * process ends, however that comes about.
 */
#ifndef ZS_KIN_H
#define ZS_KIN_H

#include "base/status.h"

/* What each rank tells the others: which kernel it runs on, and its number there. */
typedef struct zs_kin_card {
    char boot[40]; /* the kernel's boot id; empty: not known */
    uint64_t pids; /* its namespace of pids */
    int64_t pid;
} zs_kin_card;

typedef struct zs_kin zs_kin;

/* Fills in this process's card. */
void zs_kin_own_card(zs_kin_card *out);

/* New record of the processes of `world` ranks, of which none is known yet. */
zs_status zs_kin_new(int rank, int world, zs_kin **out);

/* Frees it; NULL allowed. */
void zs_kin_free(zs_kin *kin);

/* Rank `r` has shown its card: from now on it is looked at, where it is near and another process. */
void zs_kin_meet(zs_kin *kin, int r, const zs_kin_card *card);

/* Has one of those that were met ended? Then with a sentence that names it. Any thread. */
bool zs_kin_gone(const zs_kin *kin, char *sentence, size_t size);

#endif
