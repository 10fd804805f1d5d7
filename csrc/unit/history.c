/* history.c - see history.h. */
#include "history.h"

#include "engine.h"

/* Folds an event into a history: a bijection of 64 bits (splitmix64), so that no two events cancel out. */
static uint64_t fold(uint64_t history, uint64_t event)
{
    uint64_t x = history + event + UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

void zs_engine_note_step(zs_engine *engine)
{
    if (engine->stepped == engine->reductions) return;
    engine->stepped = engine->reductions;
    engine->history = fold(engine->history, engine->reductions);
}

void zs_engine_note_load(zs_engine *engine, uint64_t content)
{
    engine->history = fold(~engine->agreed, content);
    engine->stepped = engine->reductions;
}

typedef struct comms {
    zs_comm *each[4];
    size_t n;
} comms;

/* The transports of a model, each once. */
static comms comms_of(const zs_engine *engine)
{
    const zs_ranks *ranks = &engine->ranks;
    zs_comm *all[] = {ranks->all, ranks->near, ranks->shards, ranks->far};
    comms found = {.n = 0};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        bool known = all[i] == NULL;
        for (size_t k = 0; k < found.n; k++)
            known |= found.each[k] == all[i];
        if (!known) found.each[found.n++] = all[i];
    }
    return found;
}

void zs_history_tell(zs_engine *engine)
{
    if (engine->told == engine->history) return;
    comms list = comms_of(engine);
    for (size_t i = 0; i < list.n; i++) {
        zs_reader *reader = list.each[i] == engine->ranks.near ? engine->reader : NULL;
        zs_comm_tell_history(list.each[i], reader, engine->told, engine->history);
    }
    engine->told = engine->history;
}

void zs_engine_tell_mishap(zs_engine *engine, const char *what)
{
    if (*what == 0 && !engine->mishap) return;
    engine->mishap = *what != 0;
    comms list = comms_of(engine);
    for (size_t i = 0; i < list.n; i++)
        zs_comm_tell_mishap(list.each[i], what);
}

void zs_history_reduced(zs_engine *engine, bool good)
{
    engine->reductions++;
    if (!good) return;
    engine->agreed = engine->told;
    zs_engine_tell_mishap(engine, "");
}
