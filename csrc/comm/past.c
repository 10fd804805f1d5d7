/* past.c - see past.h. */
#include "comm/past.h"

#include "comm/comm.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CLAUSE = 1024, MISHAPS = 1024, SHOWN = 3 };

bool zs_past_alike(const zs_past *a, const zs_past *b)
{
    bool same = a->steps == b->steps && a->loads == b->loads && a->thaws == b->thaws && a->writes == b->writes;
    return same && (a->settings[0] == b->settings[0] || a->settings[1] == b->settings[1]);
}

void zs_past_replace(zs_past *past, const zs_past *before, const zs_past *now)
{
    past->steps += now->steps - before->steps;
    past->settings[0] += now->settings[0] - before->settings[0];
    past->settings[1] += now->settings[1] - before->settings[1];
    past->loads += now->loads - before->loads;
    past->thaws += now->thaws - before->thaws;
    past->writes += now->writes - before->writes;
}

/* --- words ---------------------------------------------------------------------------------------------------------------- */

void zs_comm_tell(zs_comm *comm, zs_topic topic, const char *text)
{
    snprintf(comm->words[topic], ZS_WORDS, "%s", text);
    if (comm->ops->talk->tell != NULL) comm->ops->talk->tell(comm, topic, text);
}

static const char *said(const zs_comm *comm, int rank, zs_topic topic)
{
    return rank == comm->rank ? comm->words[topic] : zs_comm_said(comm, rank, topic);
}

void zs_comm_mishaps(const zs_comm *comm, char *text, size_t size)
{
    size_t used = 0;
    text[0] = 0;
    for (int r = 0; r < comm->world && used < size; r++) {
        const char *what = said(comm, r, ZS_ON_MISHAP);
        if (*what != 0) used += (size_t)snprintf(text + used, size - used, "; rank %d %.*s", r, ZS_WORDS - 1, what);
    }
}

/* --- what differs, as a clause -------------------------------------------------------------------------------------------- */

static size_t line_length(const char *line)
{
    return strcspn(line, "\n");
}

/* The values in the line of `text` that begins with the same name as `line`, up to its tab; NULL: there is none. */
static const char *values_of(const char *text, const char *line)
{
    size_t name = strcspn(line, "\t") + 1;
    for (const char *at = text; *at != 0; at += line_length(at), at += *at == '\n')
        if (strncmp(at, line, name) == 0) return at + name;
    return NULL;
}

/* Appends "AdamW lr is 0.1 on rank 0 and 0.2 on rank 1" for each setting that differs; nothing if the words do not tell. */
static void list_settings(const zs_comm *comm, int other, char *text, size_t size)
{
    const char *first = said(comm, 0, ZS_ON_SETTINGS), *second = said(comm, other, ZS_ON_SETTINGS);
    int shown = 0;
    size_t used = 0;
    for (const char *at = first; *at != 0 && shown < SHOWN && used < size; at += line_length(at), at += *at == '\n') {
        size_t name = strcspn(at, "\t");
        const char *here = at + name + 1, *there = values_of(second, at);
        if (there == NULL || name >= line_length(at)) continue;
        size_t length = line_length(here), length_there = line_length(there);
        if (length == length_there && strncmp(here, there, length) == 0) continue;
        used += (size_t)snprintf(text + used, size - used, "%s%.*s is %.*s on rank 0 and %.*s on rank %d",
                                 shown++ > 0 ? ", " : ": ", (int)name, at, (int)length, here, (int)length_there, there,
                                 other);
    }
}

static void describe_writes(const zs_comm *comm, int other, char *text, size_t size)
{
    int ranks[2] = {0, other};
    size_t used =
        (size_t)snprintf(text, size, "rank 0 and rank %d have not made the same in-place writes to shards", other);
    for (int i = 0; i < 2 && used < size; i++) {
        const char *what = said(comm, ranks[i], ZS_ON_WRITE), *before = i == 0 ? " (" : "; ";
        if (*what == 0)
            used += (size_t)snprintf(text + used, size - used, "%srank %d made none", before, ranks[i]);
        else
            used += (size_t)snprintf(text + used, size - used, "%srank %d's last was %.200s", before, ranks[i], what);
    }
    if (used < size) snprintf(text + used, size - used, ")");
}

static void describe(const zs_comm *comm, const zs_pasts *pasts, char *text, size_t size)
{
    const zs_past *first = pasts->first, *second = pasts->second;
    if (first->steps != second->steps) {
        snprintf(text, size, "rank 0 has made %llu optimizer steps, but rank %d has made %llu",
                 (unsigned long long)first->steps, pasts->other, (unsigned long long)second->steps);
    } else if (first->loads != second->loads) {
        snprintf(text, size, "rank 0 and rank %d have not loaded the same state dict", pasts->other);
    } else if (first->thaws != second->thaws) {
        snprintf(text, size, "rank 0 and rank %d have not unfrozen the same parameters", pasts->other);
    } else if (first->writes != second->writes) {
        describe_writes(comm, pasts->other, text, size);
    } else {
        int used = snprintf(text, size, "rank 0 and rank %d have stepped with different param groups", pasts->other);
        list_settings(comm, pasts->other, text + used, size - (size_t)used);
    }
}

static const char *remedy(const zs_pasts *pasts)
{
    const zs_past *first = pasts->first, *second = pasts->second;
    bool rest = first->steps == second->steps && first->loads == second->loads && first->thaws == second->thaws;
    if (!rest) return "step, load and unfreeze on all ranks or on none";
    if (first->writes != second->writes)
        return "write to parameters and gradients on all ranks alike, also where a shard is empty";
    return "build the optimizer and call the scheduler on all ranks alike";
}

zs_status zs_comm_check_pasts(zs_comm *comm, const zs_pasts *pasts)
{
    if (zs_past_alike(pasts->first, pasts->second)) return ZS_OK;
    comm->apart = true;
    char clause[CLAUSE], mishaps[MISHAPS];
    describe(comm, pasts, clause, sizeof clause);
    zs_comm_mishaps(comm, mishaps, sizeof mishaps);
    return ZS_FAIL(ZS_ERR_DIVERGED, "the parameters are out of step: %s%s; load a checkpoint on all ranks, and %s",
                   clause, mishaps, remedy(pasts));
}

/* --- the end ---------------------------------------------------------------------------------------------------------------- */

static zs_status compare_ends(zs_comm *comm, zs_past *pasts)
{
    for (int r = 0; r < comm->world; r++)
        pasts[r].loads = pasts[r].thaws = 0;
    for (int r = 1; r < comm->world; r++)
        ZS_TRY(zs_comm_check_pasts(comm, &(zs_pasts){&pasts[0], &pasts[r], r}));
    return ZS_OK;
}

zs_status zs_comm_end(zs_comm *comm)
{
    if (comm->ops->talk->end == NULL || comm->lost != NULL) return ZS_OK;
    zs_past *pasts = calloc((size_t)comm->world, sizeof *pasts);
    if (pasts == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory comparing the ranks' last steps");
    bool all = false;
    zs_status status = comm->ops->talk->end(comm, pasts, &all);
    if (status == ZS_OK && all && !comm->apart) status = compare_ends(comm, pasts);
    free(pasts);
    return status;
}
