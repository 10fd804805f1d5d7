/* py_aliases.c - see py_aliases.h. */
#include "python/py_aliases.h"

#include "unit/moved.h"

/* Appends (address, bytes, unit, index) for each of the unit's parameters whose former memory other tensors may use. */
static int append_left(const zs_unit *unit, PyObject *list)
{
    for (int64_t i = 0; i < unit->n_params; i++) {
        void *memory;
        size_t bytes;
        if (!zs_moved_from(unit, i, &memory, &bytes)) continue;
        unsigned long long begin = (uintptr_t)memory, size = bytes;
        PyObject *area =
            Py_BuildValue("(KKOL)", begin, size, unit->py_owner == NULL ? Py_None : unit->py_owner, (long long)i);
        int result = area == NULL ? -1 : PyList_Append(list, area);
        Py_XDECREF(area);
        if (result < 0) return -1;
    }
    return 0;
}

static int move_from(PyObject *areas)
{
    PyObject *module = PyImport_ImportModule("zshard.guard.aliases");
    PyObject *result = module == NULL ? NULL : PyObject_CallMethod(module, "move_from", "O", areas);
    Py_XDECREF(module);
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

int zs_py_keep_aliases(const zs_engine *engine)
{
    const zs_schedule *schedule = &zs_engine_context((zs_engine *)engine)->schedule;
    if (schedule->n_open > 0) return 0;
    bool any = false;
    for (size_t i = 0; i < schedule->n && !any; i++)
        any = zs_unit_is_moved(zs_unit_of(schedule->records[i]));
    if (!any) return 0;
    PyObject *areas = PyList_New(0);
    int result = areas == NULL ? -1 : 0;
    for (size_t i = 0; i < schedule->n && result == 0; i++)
        result = append_left(zs_unit_of(schedule->records[i]), areas);
    if (result == 0 && PyList_GET_SIZE(areas) > 0) result = move_from(areas);
    Py_XDECREF(areas);
    return result;
}
