/* where.c - see where.h. */
#include "comm/where.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SHOWN = 8, RANKS = 64 };

static _Atomic double report_after = 10.0;

double zs_report_after(void)
{
    return atomic_load(&report_after);
}

double zs_set_report_after(double seconds)
{
    return atomic_exchange(&report_after, seconds);
}

/* The first rank with the same text. */
static int first_like(char (*texts)[ZS_WHERE], int rank)
{
    int r = 0;
    while (strcmp(texts[r], texts[rank]) != 0)
        r++;
    return r;
}

/* The end of the run of ranks with that text that begins at `from`. */
static int end_of_run(char (*texts)[ZS_WHERE], int world, int from)
{
    int end = from + 1;
    while (end < world && strcmp(texts[end], texts[from]) == 0)
        end++;
    return end;
}

/* The ranks with the text of rank `first`, as "rank 1" or "ranks 0-3, 5". */
static void name_ranks(char (*texts)[ZS_WHERE], int world, int first, char *text, size_t size)
{
    char list[RANKS] = "";
    size_t used = 0;
    int n = 0;
    for (int r = first; r < world; r++) {
        if (strcmp(texts[r], texts[first]) != 0) continue;
        int end = end_of_run(texts, world, r);
        if (used + 24 > sizeof list) {
            snprintf(list + used, sizeof list - used, ", ...");
            break;
        }
        used += (size_t)snprintf(list + used, sizeof list - used, "%s%d", n > 0 ? ", " : "", r);
        if (end - r > 1) used += (size_t)snprintf(list + used, sizeof list - used, "-%d", end - 1);
        n += end - r;
        r = end - 1;
    }
    snprintf(text, size, "%s %s", n == 1 ? "rank" : "ranks", list);
}

void zs_where_lines(char (*texts)[ZS_WHERE], int world, char *text, size_t size)
{
    size_t used = 0;
    int shown = 0, last = 0, more = 0;
    text[0] = 0;
    for (int r = 0; r < world && used < size; r++) {
        char who[RANKS + 16];
        int first = first_like(texts, r);
        if (shown == SHOWN && first > last) more++;
        if (first != r || shown == SHOWN) continue;
        shown++;
        last = r;
        name_ranks(texts, world, r, who, sizeof who);
        used += (size_t)snprintf(
            text + used, size - used, "\n  %s: %s", who,
            *texts[r] != 0 ? texts[r] : "no answer (its Python interpreter is busy, or its process has stopped)");
    }
    if (more > 0 && used < size) snprintf(text + used, size - used, "\n  and %d more ranks elsewhere", more);
}

/* Takes the exchanged places; false: there are none. They belong to this failure alone, so they are cleared. */
static bool take_exchanged(zs_comm *comm, char (*texts)[ZS_WHERE])
{
    bool any = false;
    for (int r = 0; r < comm->world && comm->others != NULL; r++) {
        memcpy(texts[r], comm->others[r].where, ZS_WHERE);
        texts[r][ZS_WHERE - 1] = comm->others[r].where[0] = 0;
        any |= texts[r][0] != 0;
    }
    return any;
}

static void find_lines(zs_comm *comm, char *text, size_t size)
{
    char (*texts)[ZS_WHERE] = calloc((size_t)comm->world, sizeof *texts);
    text[0] = 0;
    if (texts == NULL) return;
    bool (*ask)(zs_comm *, char (*)[ZS_WHERE]) = comm->ops->talk->locate;
    if (take_exchanged(comm, texts) || (ask != NULL && ask(comm, texts)))
        zs_where_lines(texts, comm->world, text, size);
    free(texts);
}

zs_status zs_comm_locate(zs_comm *comm, zs_status status)
{
    char lines[ZS_LINES], message[2048];
    bool is_wanted = status == ZS_ERR_TIMEOUT || status == ZS_ERR_DIVERGED;
    if (!is_wanted || comm->world == 1 || zs_last_lines()[0] != 0) return status;
    snprintf(message, sizeof message, "%s", zs_last_message());
    find_lines(comm, lines, sizeof lines);
    (void)ZS_FAIL(status, "%s", message); /* if a finalizer that Python ran meanwhile has cleared the record */
    zs_add_lines(lines);
    return status;
}

void zs_comm_locate_all(zs_comm *comm, char *text, size_t size)
{
    zs_comm_look_at_all(comm);
    find_lines(comm, text, size);
}

void zs_comm_look(zs_comm *comm)
{
    zs_script_look(comm->texts.where, sizeof comm->texts.where);
}

void zs_comm_look_at_all(zs_comm *comm)
{
    zs_diagnostics *others = NULL;
    if (comm->ops->mapped) return; /* zs_comm_locate asks them */
    if ((others = calloc((size_t)comm->world, sizeof *others)) == NULL) return;
    zs_comm_look(comm);
    if (comm->ops->talk->exchange(comm, &comm->texts, sizeof *others, others) != ZS_OK) {
        zs_clear_error();
        free(others);
        return;
    }
    free(comm->others);
    comm->others = others;
}
