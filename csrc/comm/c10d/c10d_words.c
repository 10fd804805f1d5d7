/* c10d_words.c - how messages name a collective, and the other ranks. See c10d.h. */
#include "comm/c10d/c10d.h"

#include <stdio.h>
#include <string.h>

/* What a turn does to a unit; NULL: it has none. */
static const char *unit_verb(zs_c10d_kind kind)
{
    switch (kind) {
    case ZS_C10D_GATHER: return "all-gathering parameters";
    case ZS_C10D_POST: return "reducing gradients";
    case ZS_C10D_SHARE: return "all-gathering reduced gradients";
    default: return NULL;
    }
}

bool zs_c10d_talks(const zs_c10d_turn *turn)
{
    return turn->kind == ZS_C10D_EXCHANGE || turn->kind == ZS_C10D_BROADCAST;
}

void zs_c10d_describe(const zs_c10d_turn *turn, const char *owner, char *text, size_t size)
{
    unsigned long long number = turn->number, round = turn->round, bytes = turn->bytes;
    const char *verb = unit_verb((zs_c10d_kind)turn->kind);
    if (zs_c10d_talks(turn) && turn->name[0] != 0) {
        snprintf(text, size, "in %s", turn->name);
        return;
    }
    switch ((zs_c10d_kind)turn->kind) {
    case ZS_C10D_GATHER:
        snprintf(text, size, "%s of unit '%s'%s (%llu bytes%s)", verb, turn->name, owner, bytes,
                 round == ZS_WIRE_BF16 ? ", as bf16 between hosts" : "");
        return;
    case ZS_C10D_POST:
    case ZS_C10D_SHARE: snprintf(text, size, "%s of unit '%s'%s (round %llu)", verb, turn->name, owner, round); return;
    case ZS_C10D_EXCHANGE: snprintf(text, size, "all-gathering message %llu (%llu bytes)", number, bytes); return;
    case ZS_C10D_BROADCAST:
        snprintf(text, size, "broadcasting %llu bytes from rank %llu (message %llu)", bytes, round, number);
        return;
    case ZS_C10D_GIVE_UP: snprintf(text, size, "abandoning its backward"); return;
    }
    snprintf(text, size, "in an unknown collective (a different zshard version?)");
}

void zs_c10d_describe_talk(const zs_c10d_turn *turn, char *text, size_t size)
{
    zs_c10d_turn nameless = *turn;
    nameless.name[0] = 0;
    zs_c10d_describe(&nameless, "", text, size);
    size_t length = strlen(text);
    if (length < size) snprintf(text + length, size - length, " in %s", turn->name);
}

void zs_c10d_describe_brief(const zs_c10d_turn *turn, char *text, size_t size)
{
    switch ((zs_c10d_kind)turn->kind) {
    case ZS_C10D_GATHER:
    case ZS_C10D_POST:
    case ZS_C10D_SHARE:
        snprintf(text, size, "%s of unit '%s'", unit_verb((zs_c10d_kind)turn->kind), turn->name);
        return;
    case ZS_C10D_EXCHANGE: snprintf(text, size, "all-gathering a message"); return;
    case ZS_C10D_BROADCAST: snprintf(text, size, "broadcasting"); return;
    default: zs_c10d_describe(turn, "", text, size);
    }
}

const char *zs_c10d_remedy_of(const zs_c10d_turn *turn)
{
    if (zs_c10d_talks(turn)) return "call it on all ranks";
    return "run the same forwards and backwards on all ranks" ZS_UNEVEN;
}

void zs_c10d_describe_here(const zs_c10d_turn *turn, const char *owner, char *text, size_t size)
{
    char place[ZS_PLACE];
    zs_script_place(place, sizeof place);
    if (place[0] != 0 && zs_c10d_talks(turn) && turn->name[0] != 0) { /* which contains its name */
        snprintf(text, size, "%s", place);
        return;
    }
    zs_c10d_describe(turn, owner, text, size);
    size_t length = strlen(text);
    if (place[0] != 0 && length < size) snprintf(text + length, size - length, ", %s", place);
}

void zs_c10d_name_others(const zs_c10d_comm *comm, char *text, size_t size)
{
    int world = comm->base.world;
    size_t length = (size_t)snprintf(text, size, world == 2 ? "rank" : "one of ranks");
    for (int r = 0, told = 0; r < world && length + 16 < size; r++) {
        if (r == comm->base.rank) continue;
        length += (size_t)snprintf(text + length, size - length, "%s%d", told++ == 0 ? " " : ", ", r);
    }
}
