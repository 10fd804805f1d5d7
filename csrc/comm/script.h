/* script.h - the place of this rank's script, for messages: the public call that it is in, and its line.
 *
 * A call sets its name once, when it begins. Ranks exchange and broadcast only within the same call: one without a name
 * ("") is like others without a name alone. The line is looked up only for an error, or when a peer that waits long
 * asks; it is text, and decides nothing. */
#ifndef ZS_SCRIPT_H
#define ZS_SCRIPT_H

#include <stdbool.h>
#include <stddef.h>

enum {
    ZS_CALL = 48,           /* room for a call's name, such as "save()" */
    ZS_PLACE = ZS_CALL + 8, /* room for "in save()" */
    ZS_WHERE = 320,         /* room for "train.py:41 in train(), in save(), step 12" */
};

/* Remedies to append to a sentence. */
#define ZS_ALONE "; where one rank evaluates or generates alone, use torch.no_grad()"
#define ZS_UNEVEN "; with uneven numbers of batches, loop over `model.join(loader)`"

/* This thread enters the call `name`. False: it already is in another one, whose name stays. */
bool zs_call_begin(const char *name);

/* The call for which zs_call_begin returned true returns. */
void zs_call_end(void);

/* The call that this thread is in; "": none with a name. Borrowed. */
const char *zs_call_name(void);

/* Exchanges the name of the call with `name`, which zs_call_swap then restores: for exchanges that ranks in different
 * calls take part in. */
void zs_call_swap(char name[ZS_CALL]);

/* The call that the main thread is in, for other threads: NULL unless zs_call_watch was called on it. Borrowed. */
void zs_call_watch(void);
const char *zs_call_of_main(void);

/* This thread's place, as "in save()"; "" outside of such calls. */
void zs_script_place(char *text, size_t size);

/* Sets how to look up the line of this thread's script, with its call, step and unit; it may run Python. / Does so;
 * "" where that is unknown. */
void zs_script_on_look(void (*look)(char *text, size_t size));
void zs_script_look(char *text, size_t size);

#endif
