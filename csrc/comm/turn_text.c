/* turn_text.c - names of collectives in messages. See turn.h. */
#include "comm/turn.h"

#include <stdio.h>
#include <string.h>

/* The verb for a turn of a unit; NULL: it has none. */
static const char *unit_verb(zs_turn_kind kind)
{
    switch (kind) {
    case ZS_TURN_GATHER: return "all-gathering parameters";
    case ZS_TURN_POST: return "reducing gradients";
    case ZS_TURN_SHARE: return "all-gathering reduced gradients";
    default: return NULL;
    }
}

bool zs_turn_talks(const zs_turn *turn)
{
    return turn->kind == ZS_TURN_EXCHANGE || turn->kind == ZS_TURN_BROADCAST;
}

void zs_turn_describe(const zs_turn *turn, const char *owner, char *text, size_t size)
{
    unsigned long long number = turn->number, round = turn->round, bytes = turn->bytes;
    const char *verb = unit_verb((zs_turn_kind)turn->kind);
    if (zs_turn_talks(turn) && turn->name[0] != 0) {
        snprintf(text, size, "in %s", turn->name);
        return;
    }
    switch ((zs_turn_kind)turn->kind) {
    case ZS_TURN_GATHER:
        snprintf(text, size, "%s of unit '%s'%s (%llu bytes%s)", verb, turn->name, owner, bytes,
                 turn->round == ZS_WIRE_BF16 ? ", as bf16 between hosts" : "");
        return;
    case ZS_TURN_POST:
    case ZS_TURN_SHARE: snprintf(text, size, "%s of unit '%s'%s (round %llu)", verb, turn->name, owner, round); return;
    case ZS_TURN_EXCHANGE: snprintf(text, size, "all-gathering message %llu (%llu bytes)", number, bytes); return;
    case ZS_TURN_BROADCAST:
        snprintf(text, size, "broadcasting %llu bytes from rank %llu (message %llu)", bytes, round, number);
        return;
    case ZS_TURN_GIVE_UP: snprintf(text, size, "abandoning its backward"); return;
    }
    snprintf(text, size, "in an unknown collective (a different zshard version?)");
}

void zs_turn_describe_talk(const zs_turn *turn, char *text, size_t size)
{
    zs_turn nameless = *turn;
    nameless.name[0] = 0;
    zs_turn_describe(&nameless, "", text, size);
    size_t length = strlen(text);
    if (length < size) snprintf(text + length, size - length, " in %s", turn->name);
}

void zs_turn_describe_brief(const zs_turn *turn, char *text, size_t size)
{
    switch ((zs_turn_kind)turn->kind) {
    case ZS_TURN_GATHER:
    case ZS_TURN_POST:
    case ZS_TURN_SHARE:
        snprintf(text, size, "%s of unit '%s'", unit_verb((zs_turn_kind)turn->kind), turn->name);
        return;
    case ZS_TURN_EXCHANGE: snprintf(text, size, "all-gathering a message"); return;
    case ZS_TURN_BROADCAST: snprintf(text, size, "broadcasting"); return;
    default: zs_turn_describe(turn, "", text, size);
    }
}

const char *zs_turn_remedy(const zs_turn *turn)
{
    if (zs_turn_talks(turn)) return "call it on all ranks";
    return "run the same forwards and backwards on all ranks" ZS_UNEVEN;
}

void zs_turn_describe_here(const zs_turn *turn, const char *owner, char *text, size_t size)
{
    char place[ZS_PLACE];
    zs_script_place(place, sizeof place);
    if (place[0] != 0 && zs_turn_talks(turn) && turn->name[0] != 0) { /* which contains its name */
        snprintf(text, size, "%s", place);
        return;
    }
    zs_turn_describe(turn, owner, text, size);
    size_t length = strlen(text);
    if (place[0] != 0 && length < size) snprintf(text + length, size - length, ", %s", place);
}
