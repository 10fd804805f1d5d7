/* script.h - where this rank's script is, for messages: the public call that it is in.
 *
 * A call sets its name once, when it begins, so ranks can compare the names of the calls that they exchange for. */
#ifndef ZS_SCRIPT_H
#define ZS_SCRIPT_H

#include <stdbool.h>
#include <stddef.h>

enum {
    ZS_CALL = 48,           /* room for a call's name, such as "save()" */
    ZS_PLACE = ZS_CALL + 8, /* room for "in save()" */
};

/* Remedies to append to a sentence. */
#define ZS_ALONE "; where one rank evaluates or generates alone, use torch.no_grad()"
#define ZS_UNEVEN "; with uneven numbers of batches, train within `with model.join(optimizer):`"

/* This thread enters the call `name`. False: it already is in another one, whose name stays. */
bool zs_call_begin(const char *name);

/* The call for which zs_call_begin returned true returns. */
void zs_call_end(void);

/* The call that this thread is in; "": none with a name. Borrowed. */
const char *zs_call_name(void);

/* May ranks in these calls communicate with each other? "" may be any call. */
bool zs_calls_match(const char *a, const char *b);

/* This thread's place, as "in save()"; "" outside of such calls. */
void zs_script_place(char *text, size_t size);

#endif
