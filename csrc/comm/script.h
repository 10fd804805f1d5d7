/* script.h - where this rank's script is, for messages: the public call that it is in.
 *
 * A call names itself once, as it begins, so whatever it exchanges can be compared with what others exchange.
 */
#ifndef ZS_SCRIPT_H
#define ZS_SCRIPT_H

#include <stdbool.h>
#include <stddef.h>

enum {
    ZS_CALL = 48,   /* room for a call's name, such as "save()" */
    ZS_PLACE = ZS_CALL + 8, /* room for "in save()" */
};

/* Remedies that go on a sentence. */
#define ZS_ALONE "; where one rank evaluates or generates alone, use torch.no_grad()"
#define ZS_UNEVEN "; with uneven numbers of batches, train within `with model.join(optimizer):`"

/* This thread is in the call `name` from now on. False: it is in another one already, whose name stays. */
bool zs_call_begin(const char *name);

/* It has returned from what zs_call_begin said true for. */
void zs_call_end(void);

/* The call that this thread is in; "": none with a name. Borrowed. */
const char *zs_call_name(void);

/* May ranks in these calls meet? "" may be any call. */
bool zs_calls_match(const char *a, const char *b);

/* This thread's place, as "in save()"; "" outside of such calls. */
void zs_script_place(char *text, size_t size);

#endif
