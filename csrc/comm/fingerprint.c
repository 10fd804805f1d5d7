/* fingerprint.c - see fingerprint.h. */
#include "comm/fingerprint.h"

#include "comm/comm.h"
#include "comm/where.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CLAUSE = 1024, SHOWN = 3 };

/* Numbers in param groups whose relative difference is smaller are equal: hosts may round differently. */
static const double near = 1e-6;

void zs_fingerprint_replace(zs_fingerprint *fingerprint, const zs_fingerprint *before, const zs_fingerprint *now)
{
    fingerprint->steps += now->steps - before->steps;
    fingerprint->settings += now->settings - before->settings;
    fingerprint->counts += now->counts - before->counts;
    fingerprint->loads += now->loads - before->loads;
    fingerprint->frozen += now->frozen - before->frozen;
    fingerprint->writes += now->writes - before->writes;
    fingerprint->draws += now->draws - before->draws;
    fingerprint->grads += now->grads - before->grads;
}

/* --- texts -------------------------------------------------------------------------------------------------------- */

static char *place_of(zs_diagnostics *texts, zs_topic topic, size_t *size)
{
    switch (topic) {
    case ZS_ON_FAILURE: *size = sizeof texts->failure; return texts->failure;
    case ZS_ON_WRITE: *size = sizeof texts->write; return texts->write;
    case ZS_ON_SETTINGS: break;
    }
    *size = sizeof texts->settings;
    return texts->settings;
}

const char *zs_diagnostics_on(const zs_diagnostics *texts, zs_topic topic)
{
    size_t size;
    return place_of((zs_diagnostics *)texts, topic, &size);
}

void zs_diagnostics_set(zs_diagnostics *texts, zs_topic topic, const char *text)
{
    size_t size;
    char *place = place_of(texts, topic, &size);
    const char *end = memchr(text, 0, size - 1);
    size_t length = end != NULL ? (size_t)(end - text) : size - 1;
    memcpy(place, text, length);
    place[length] = 0;
}

void zs_comm_publish(zs_comm *comm, zs_topic topic, const char *text)
{
    zs_diagnostics_set(&comm->texts, topic, text);
    if (comm->ops->talk->publish != NULL) comm->ops->talk->publish(comm, topic, text);
}

/* NULL: unknown. */
static const char *text_of(const zs_comm *comm, int rank, zs_topic topic)
{
    if (rank == comm->rank) return zs_diagnostics_on(&comm->texts, topic);
    if (comm->others != NULL) return zs_diagnostics_on(&comm->others[rank], topic);
    return zs_comm_published(comm, rank, topic);
}

/* Do all ranks report the same failure? Then that is not why they differ. */
static bool have_same_failure(const zs_comm *comm)
{
    const char *first = text_of(comm, 0, ZS_ON_FAILURE);
    bool same = first != NULL;
    for (int r = 1; r < comm->world && same; r++) {
        const char *what = text_of(comm, r, ZS_ON_FAILURE);
        same = what != NULL && strcmp(what, first) == 0;
    }
    return same;
}

void zs_comm_failures(const zs_comm *comm, char *text, size_t size)
{
    size_t used = 0;
    text[0] = 0;
    if (have_same_failure(comm)) return;
    for (int r = 0; r < comm->world && used < size; r++) {
        const char *what = text_of(comm, r, ZS_ON_FAILURE);
        if (what != NULL && *what != 0) used += (size_t)snprintf(text + used, size - used, "; rank %d %.500s", r, what);
    }
}

void zs_comm_set_others(zs_comm *comm, zs_diagnostics *others)
{
    free(comm->others);
    comm->others = others;
}

/* Makes all ranks exchange their texts, unless they have them. */
static zs_status learn(zs_comm *comm)
{
    int peer = comm->rank == 0 ? comm->world - 1 : 0;
    if (zs_comm_published(comm, peer, ZS_ON_SETTINGS) != NULL) return ZS_OK; /* so do all ranks */
    zs_diagnostics *others = calloc((size_t)comm->world, sizeof *others);
    if (others == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory comparing the ranks' histories");
    zs_comm_look(comm);
    zs_status status = zs_comm_exchange(comm, &comm->texts, sizeof *others, others);
    if (status == ZS_OK)
        zs_comm_set_others(comm, others);
    else
        free(others);
    return status;
}

/* --- lines of settings -------------------------------------------------------------------------------------------- */

/* A line: its name, and its values. */
typedef struct line {
    const char *name, *values;
    size_t name_length, length; /* of the name, of the values */
} line;

/* The line that begins at `at`; false at the end. A truncated line has no values. */
static bool read_line(const char *at, line *out)
{
    if (*at == 0) return false;
    size_t whole = strcspn(at, "\n"), name = strcspn(at, "\t\n");
    bool complete = at[whole] == '\n' && name < whole;
    *out = (line){at, at + name + 1, name, complete ? whole - name - 1 : 0};
    return true;
}

static const char *after(const char *at)
{
    at += strcspn(at, "\n");
    return *at == '\n' ? at + 1 : at;
}

/* The line of `text` with the same name. */
static bool find_line(const char *text, const line *like, line *out)
{
    for (; read_line(text, out); text = after(text))
        if (out->name_length == like->name_length && strncmp(out->name, like->name, like->name_length) == 0)
            return true;
    return false;
}

static bool is_separator(char c)
{
    return c == ',' || c == ' ' || c == '(' || c == ')';
}

/* The next word of `text` before `end`, of *length characters. */
static const char *next_word(const char *text, const char *end, size_t *length)
{
    while (text < end && is_separator(*text))
        text++;
    *length = 0;
    while (text + *length < end && !is_separator(text[*length]))
        (*length)++;
    return text;
}

static bool same_word(const char *a, size_t a_length, const char *b, size_t b_length)
{
    if (a_length == b_length && strncmp(a, b, a_length) == 0) return true;
    char texts[2][32], *ends[2];
    if (a_length == 0 || b_length == 0 || a_length >= sizeof texts[0] || b_length >= sizeof texts[1]) return false;
    snprintf(texts[0], sizeof texts[0], "%.*s", (int)a_length, a);
    snprintf(texts[1], sizeof texts[1], "%.*s", (int)b_length, b);
    double x = strtod(texts[0], &ends[0]), y = strtod(texts[1], &ends[1]);
    if (*ends[0] != 0 || *ends[1] != 0) return false;
    bool whole = strcspn(texts[0], ".e") == a_length && strcspn(texts[1], ".e") == b_length; /* a count */
    return !whole && fabs(x - y) <= near * fmax(fabs(x), fabs(y));
}

static bool same_values(const line *a, const line *b)
{
    const char *a_end = a->values + a->length, *b_end = b->values + b->length, *x = a->values, *y = b->values;
    for (;;) {
        size_t x_length, y_length;
        x = next_word(x, a_end, &x_length);
        y = next_word(y, b_end, &y_length);
        if (x_length == 0 && y_length == 0) return true;
        if (!same_word(x, x_length, y, y_length)) return false;
        x += x_length;
        y += y_length;
    }
}

static bool was_cut_off(const char *settings)
{
    return strlen(settings) == sizeof((zs_diagnostics){0}).settings - 1;
}

/* Are the settings of two ranks the same up to rounding, according to their texts? */
static bool are_near(const char *a, const char *b)
{
    line one, other;
    if (was_cut_off(a) || was_cut_off(b) || *a == 0) return false;
    for (const char *at = b; read_line(at, &one); at = after(at))
        if (!find_line(a, &one, &other)) return false;
    for (const char *at = a; read_line(at, &one); at = after(at))
        if (!find_line(b, &one, &other) || !same_values(&one, &other)) return false;
    return true;
}

/* --- what differs, as a clause ------------------------------------------------------------------------------------ */

/* Appends "AdamW lr is 0.1 on rank 0 and 0.2 on rank 1" for each setting that differs; nothing if the texts do not
 * show it. */
static void list_settings(const zs_comm *comm, int other, char *text, size_t size)
{
    const char *first = text_of(comm, 0, ZS_ON_SETTINGS), *second = text_of(comm, other, ZS_ON_SETTINGS);
    int shown = 0;
    size_t used = 0;
    line here, there;
    if (first == NULL || second == NULL) return;
    for (const char *at = first; read_line(at, &here) && shown < SHOWN && used < size; at = after(at)) {
        if (!find_line(second, &here, &there) || same_values(&here, &there)) continue;
        used += (size_t)snprintf(text + used, size - used, "%s%.*s is %.*s on rank 0 and %.*s on rank %d",
                                 shown++ > 0 ? ", " : ": ", (int)here.name_length, here.name, (int)here.length,
                                 here.values, (int)there.length, there.values, other);
    }
}

/* Appends "(rank 0 made none; rank 1's last was mul_() on 'weight')". */
static void list_writes(const zs_comm *comm, int other, char *text, size_t size)
{
    const char *what[2] = {text_of(comm, 0, ZS_ON_WRITE), text_of(comm, other, ZS_ON_WRITE)};
    int ranks[2] = {0, other};
    size_t used = 0;
    if (what[0] == NULL || what[1] == NULL || (*what[0] == 0 && *what[1] == 0)) return;
    for (int i = 0; i < 2 && used < size; i++) {
        const char *before = i == 0 ? " (" : "; ";
        if (*what[i] == 0)
            used += (size_t)snprintf(text + used, size - used, "%srank %d made none", before, ranks[i]);
        else
            used += (size_t)snprintf(text + used, size - used, "%srank %d's last was %s", before, ranks[i], what[i]);
    }
    if (used < size) snprintf(text + used, size - used, ")");
}

/* In what a rank differs from rank 0. */
typedef struct difference {
    const zs_fingerprint *first, *second;
    int other;  /* the rank */
    bool looks; /* found by a rank that reads alone */
} difference;

static bool only_settings_differ(const difference *d)
{
    const zs_fingerprint *a = d->first, *b = d->second;
    return a->steps == b->steps && a->counts == b->counts && a->loads == b->loads && a->frozen == b->frozen &&
           a->draws == b->draws && a->writes == b->writes && a->grads == b->grads;
}

static void describe(const zs_comm *comm, const difference *d, char *text, size_t size)
{
    const zs_fingerprint *first = d->first, *second = d->second;
    int used = 0;
    if (first->steps != second->steps) {
        snprintf(text, size, "rank 0 has made %llu optimizer steps, but rank %d has made %llu",
                 (unsigned long long)first->steps, d->other, (unsigned long long)second->steps);
    } else if (first->counts != second->counts) {
        snprintf(text, size, "the optimizer's state counts %llu steps on rank 0 and %llu on rank %d",
                 (unsigned long long)first->counts, (unsigned long long)second->counts, d->other);
    } else if (first->loads != second->loads) {
        snprintf(text, size, "rank 0 and rank %d have not loaded the same state dict", d->other);
    } else if (first->frozen != second->frozen) {
        snprintf(text, size, "rank 0 and rank %d do not train the same parameters: set requires_grad on all ranks",
                 d->other);
    } else if (first->draws != second->draws) {
        used = snprintf(text, size, "rank 0 and rank %d have not initialized parameters or written to full ones alike",
                        d->other);
        list_writes(comm, d->other, text + used, size - (size_t)used);
    } else if (!only_settings_differ(d)) {
        used = snprintf(text, size, "rank 0 and rank %d have not made the same in-place writes to shards", d->other);
        list_writes(comm, d->other, text + used, size - (size_t)used);
    } else {
        used = snprintf(text, size, "rank 0 and rank %d have stepped with different param groups", d->other);
        list_settings(comm, d->other, text + used, size - (size_t)used);
    }
}

static bool have_drawn_otherwise(const difference *d)
{
    const zs_fingerprint *a = d->first, *b = d->second;
    return a->steps == b->steps && a->loads == b->loads && a->frozen == b->frozen && a->draws != b->draws;
}

static const char *remedy(const difference *d)
{
    const zs_fingerprint *first = d->first, *second = d->second;
    if (d->looks && first->steps != second->steps)
        return "a rank that reads parameters alone (state_dict(), full_tensor(), a forward without gradients) must do "
               "so after optimizer.step(), not between backward and step, where another may be ahead; if all ranks "
               "read, load a checkpoint on all ranks, and step on all ranks or on none";
    if (have_drawn_otherwise(d))
        return "initialize on all ranks, after torch.manual_seed() with one seed, or by model.apply(fn), which takes "
               "rank 0's "
               "values, and write the same values on all ranks within summon_full_params()";
    if (only_settings_differ(d))
        return "load a checkpoint on all ranks, and build the optimizer and call the scheduler on all ranks alike";
    if (first->counts != second->counts)
        return "load a checkpoint on all ranks, and load the optimizer's state on all ranks alike";
    if (first->steps == second->steps && first->loads == second->loads && first->frozen == second->frozen)
        return "load a checkpoint on all ranks, and write to parameters and gradients on all ranks alike, also where a "
               "shard is empty";
    return "load a checkpoint on all ranks, and step, load and unfreeze on all ranks or on none";
}

static zs_status fail(zs_comm *comm, const difference *d)
{
    char clause[CLAUSE], failures[ZS_FAILURES];
    describe(comm, d, clause, sizeof clause);
    zs_comm_failures(comm, failures, sizeof failures);
    comm->apart = true;
    /* Counts of reads do not say who reads: until a barrier, one rank's read alone looks like a read by all ranks. */
    const char *after = d->looks ? "; and call torch.distributed.barrier() after code that one rank runs alone" : "";
    zs_status status =
        ZS_FAIL(ZS_ERR_DIVERGED, "the parameters are out of step: %s%s; %s%s", clause, failures, remedy(d), after);
    return comm->ended ? status : zs_comm_locate(comm, status);
}

/* Once settings have really differed, only digests count until they are equal again: texts cover only the last step. */
static bool is_tolerable(const zs_comm *comm, const difference *d)
{
    if (!only_settings_differ(d) || comm->apart) return false;
    const char *first = text_of(comm, 0, ZS_ON_SETTINGS), *second = text_of(comm, d->other, ZS_ON_SETTINGS);
    return first == NULL || second == NULL || are_near(first, second);
}

static zs_status check(zs_comm *comm, const zs_fingerprint *fingerprints, bool looks)
{
    bool same = true;
    for (int r = 1; r < comm->world; r++) {
        difference d = {&fingerprints[0], &fingerprints[r], r, looks};
        if (memcmp(d.first, d.second, sizeof *fingerprints) == 0) continue;
        same = false;
        if (!is_tolerable(comm, &d)) return fail(comm, &d);
    }
    if (same) comm->apart = false;
    return ZS_OK;
}

zs_status zs_comm_check_fingerprints(zs_comm *comm, const zs_fingerprint *fingerprints)
{
    return check(comm, fingerprints, false);
}

zs_status zs_comm_check_look(zs_comm *comm, const zs_fingerprint *fingerprints)
{
    return check(comm, fingerprints, true);
}

zs_status zs_comm_compare_fingerprints(zs_comm *comm, const zs_fingerprint *fingerprints)
{
    bool same = true;
    for (int r = 1; r < comm->world; r++)
        same &= memcmp(&fingerprints[r], &fingerprints[0], sizeof *fingerprints) == 0;
    if (!same) ZS_TRY(learn(comm));
    return zs_comm_check_fingerprints(comm, fingerprints);
}

/* --- the end ------------------------------------------------------------------------------------------------------ */

static bool have_loaded(const zs_comm *comm, const zs_fingerprint *fingerprints)
{
    bool loaded = false;
    for (int r = 1; r < comm->world; r++)
        loaded |= fingerprints[r].loads != fingerprints[0].loads || fingerprints[r].frozen != fingerprints[0].frozen;
    return loaded;
}

zs_status zs_comm_end(zs_comm *comm)
{
    if (comm->ops->talk->end == NULL || comm->ended || comm->is_control) return ZS_OK;
    comm->ended = true;
    if (comm->lost != NULL || comm->failed) return ZS_OK;
    zs_fingerprint *fingerprints = calloc((size_t)comm->world, sizeof *fingerprints);
    if (fingerprints == NULL) return ZS_FAIL(ZS_ERR_MEMORY, "out of memory comparing the ranks' last steps");
    bool all = false;
    zs_status status = comm->ops->talk->end(comm, fingerprints, &all);
    if (status == ZS_OK && all && !comm->apart && !have_loaded(comm, fingerprints))
        status = zs_comm_check_fingerprints(comm, fingerprints);
    free(fingerprints);
    return status;
}
