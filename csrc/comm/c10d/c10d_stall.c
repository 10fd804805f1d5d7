/* c10d_stall.c - a rank that waits long for others finds out where their scripts are. See c10d.h.
 *
 * A process group reports nothing about ranks that have not come. They may be in a collective of the script, such as
 * torch's barrier while this rank evaluates alone. So this rank asks through the group's store, a thread of theirs
 * answers (ranks/stalls.py), and the answer goes into one line on stderr, and into the error at the end. */
#include "base/log.h"
#include "comm/c10d/c10d.h"
#include "comm/where.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Seconds: from the first question to the line on stderr; from a last question to the end of the wait; between two
 * reads of answers. */
static const double ask_before = 3.0, ask_again = 4.0, look_every = 0.4;

enum { STATE = 40, SHOWN = 4, PLACES = 1024 };

/* An answer: 'w' for a rank that waits here as well, or '-' and its call; then a line break, and where its script is,
 * as zs_script_look says. */
typedef struct answer {
    char text[STATE + ZS_WHERE];
} answer;

void zs_c10d_stall_end(zs_c10d_stall *stall)
{
    free(stall->answers);
    stall->answers = NULL;
}

static void ask(zs_c10d_comm *comm, zs_c10d_stall *stall)
{
    stall->questions++;
    stall->question = zs_group_ask_positions(comm->group);
    stall->looked = 0;
}

/* Keeps an old answer of a rank until it answers again. */
static void read_answers(zs_c10d_comm *comm, zs_c10d_stall *stall)
{
    size_t world = (size_t)comm->base.world;
    if (stall->answers == NULL) stall->answers = calloc(world, sizeof(answer));
    answer *answers = stall->answers;
    for (size_t r = 0; r < world && answers != NULL; r++)
        zs_group_read_answer(comm->group, stall->question, (int)r, answers[r].text, sizeof answers[r].text);
}

/* The known places, as "; rank 1 is in barrier() at train.py:44 (main)"; false: none. */
static bool list_places(const zs_c10d_comm *comm, const answer *answers, char *text, size_t size)
{
    int shown = 0, more = 0;
    size_t length = 0;
    text[0] = 0;
    for (int r = 0; answers != NULL && r < comm->base.world; r++) {
        if (r == comm->base.rank || answers[r].text[0] == 0 || answers[r].text[0] == 'w') continue;
        if (shown == SHOWN) more++;
        if (shown == SHOWN || length >= size) continue;
        int state = (int)strcspn(answers[r].text, "\n") - 1;
        length += (size_t)snprintf(text + length, size - length, "; rank %d is %.*s", r, state, answers[r].text + 1);
        shown++;
    }
    if (more > 0 && length < size) snprintf(text + length, size - length, "; so are or wait %d more ranks", more);
    return shown > 0;
}

/* Advice for the script. */
static const char *remedy_of(const zs_c10d_comm *comm, const zs_turn *turn)
{
    bool looks = turn->kind == ZS_TURN_GATHER && zs_reading_is_look(comm->base.reading);
    if (looks || turn->kind == ZS_TURN_EXCHANGE || turn->kind == ZS_TURN_BROADCAST)
        return "over c10d all ranks must take part: call it on all of them, or on one host use transport='shm', over "
               "which "
               "one rank may evaluate and call state_dict() alone";
    if (turn->kind == ZS_TURN_GATHER && !zs_reading_is_backward(comm->base.reading))
        return "run a forward that records gradients on all ranks" ZS_ALONE ZS_UNEVEN;
    return zs_turn_remedy(turn);
}

void zs_c10d_stall_text(const zs_c10d_comm *comm, const zs_turn *turn, const zs_c10d_stall *stall, char *text,
                        size_t size)
{
    char places[PLACES];
    const answer *answers = stall->answers;
    text[0] = 0;
    if (answers == NULL) return;
    if (!list_places(comm, answers, places, sizeof places)) return;
    snprintf(text, size, "%s; %s", places, remedy_of(comm, turn));
}

void zs_c10d_stall_lines(const zs_c10d_comm *comm, const zs_c10d_stall *stall, char *text, size_t size)
{
    int world = comm->base.world;
    const answer *answers = stall->answers;
    char (*texts)[ZS_WHERE] = calloc((size_t)world, sizeof *texts);
    text[0] = 0;
    for (int r = 0; r < world && texts != NULL && answers != NULL; r++) {
        const char *line = strchr(answers[r].text, '\n');
        if (line != NULL) snprintf(texts[r], ZS_WHERE, "%s", line + 1);
    }
    if (texts != NULL && answers != NULL) {
        zs_script_look(texts[comm->base.rank], ZS_WHERE);
        if (texts[comm->base.rank][0] != 0) zs_where_lines(texts, world, text, size);
    }
    free(texts);
}

void zs_c10d_name_others(const zs_c10d_comm *comm, char *text, size_t size)
{
    int world = comm->base.world;
    size_t length = (size_t)snprintf(text, size, world == 2 ? "rank" : "one of ranks");
    for (int r = 0, n = 0; r < world && length + 16 < size; r++) {
        if (r == comm->base.rank) continue;
        length += (size_t)snprintf(text + length, size - length, "%s%d", n++ == 0 ? " " : ", ", r);
    }
}

static void report(const zs_c10d_comm *comm, const zs_turn *turn, const zs_c10d_stall *stall, double waited)
{
    char phrase[ZS_TURN_PHRASE], who[ZS_TURN_PHRASE], places[ZS_C10D_TEXT], lines[ZS_LINES];
    zs_turn_describe_here(turn, "", phrase, sizeof phrase);
    zs_c10d_name_others(comm, who, sizeof who);
    zs_c10d_stall_text(comm, turn, stall, places, sizeof places);
    zs_c10d_stall_lines(comm, stall, lines, sizeof lines);
    zs_log(ZS_LOG_INFO, "has been waiting %.0f s for %s while %s%s", waited, who, phrase, places);
    fprintf(stderr, "zshard: rank %d has been waiting %.0f s for %s while %s%s%s\n", comm->base.rank, waited, who,
            phrase, places, lines);
}

void zs_c10d_stall_check(zs_c10d_comm *comm, const zs_turn *turn, zs_c10d_stall *stall, double waited)
{
    double report_after = zs_report_after(), ask_after = report_after - ask_before;
    double limit = comm->base.timeout, first = limit / 4 < ask_after ? limit / 4 : ask_after;
    bool late = stall->questions == 1 && waited > limit - ask_again && limit > first + 2 * ask_again;
    if ((stall->questions == 0 && waited > first) || late) ask(comm, stall);
    if (stall->question != 0 && waited - stall->looked > look_every) {
        read_answers(comm, stall);
        stall->looked = waited;
    }
    if (stall->reported || waited < report_after) return;
    stall->reported = true;
    report(comm, turn, stall, waited);
}
