/* Steps of environments' rows without a call of numpy or torch for each operation on a few numbers.

   cartpole         one step of CartPole's rows
   cartpole_begin   new episodes in those that ended
   locomotion       one step of MuJoCo's rows: the simulations, and what is observed of them
   helper           start a thread that takes rows of `locomotion` off the caller's hands
   network          the output of a small network of linear layers for a few rows
   epsilon_greedy   choose actions by their values
   write_rows       copy rows to a table of one array per column

Each but `network` computes what the Python beside it does (backends.py, mujoco_rows.py, rows.py, policy_step.py), by the
same operations in the same order, so that every bit is the same: the file is compiled without contraction to fused operations.
Results are written to memory of the caller, whose addresses are those of torch tensors; numpy arrays come as buffers. Where
this module could not be compiled, Python does it all. */

#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include <Python.h>
#include <limits.h>
#include <math.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#ifdef __linux__
#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* What a step leaves: pointers to torch tensors' memory, in the order in which they are passed. */
typedef struct {
    float *observation, *standing_at, *reward;
    uint8_t *done, *terminated, *truncated;
} Outcome;

static void *pointer(PyObject *number) { return PyLong_AsVoidPtr(number); }

static Outcome outcome(PyObject *const *args) {
    Outcome out = {pointer(args[0]), pointer(args[1]), pointer(args[2]),
                   pointer(args[3]), pointer(args[4]), pointer(args[5])};
    return out;
}

/* Open buffers of at least so many bytes; what was opened is for `release` in any case. */
static int open_buffers(PyObject *const *objects, Py_buffer *buffers, const Py_ssize_t *sizes, int count) {
    for (int i = 0; i < count; i++) {
        if (PyObject_GetBuffer(objects[i], &buffers[i], PyBUF_WRITABLE) < 0) return -1;
        if (buffers[i].len < sizes[i]) {
            PyErr_Format(PyExc_ValueError, "buffer %d has %zd bytes, not %zd", i, buffers[i].len, sizes[i]);
            return -1;
        }
    }
    return 0;
}

static void release(Py_buffer *buffers, int count) {
    for (int i = 0; i < count; i++)
        if (buffers[i].obj) PyBuffer_Release(&buffers[i]);
}

static int expect(Py_ssize_t count, Py_ssize_t wanted) {
    if (count == wanted) return 0;
    PyErr_Format(PyExc_TypeError, "%zd arguments, not %zd", count, wanted);
    return -1;
}

/* Add an episode that ended to a list, made when first needed, and begin to count the next one. */
static int end_episode(PyObject **episodes, double *total, int64_t *length) {
    if (*episodes == NULL && (*episodes = PyList_New(0)) == NULL) return -1;
    PyObject *episode = Py_BuildValue("dL", *total, (long long)*length);
    const int failed = episode == NULL || PyList_Append(*episodes, episode) < 0;
    Py_XDECREF(episode);
    *total = 0, *length = 0;
    return failed ? -1 : 0;
}

/* CartPole --------------------------------------------------------------------------------------------------------- */

/* cartpole(state [4, n] f64, steps [n] i32, cosine [n], sine [n], numbers, standing [n, 4] f32, returns [n] f64,
            lengths [n] i64, n, longest, action i64*, live bool* or 0, outcome …)
   -> rows moved, or -1: there is no such action, and nothing has moved; and the episodes that ended, or None
   numbers: mass, pole, leverage, gravity, length, tau, third, force, limit of x, limit of theta */
static PyObject *cartpole(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    if (expect(count, 18) < 0) return NULL;
    const Py_ssize_t n = PyLong_AsSsize_t(args[8]);
    const long longest = PyLong_AsLong(args[9]);
    const int64_t *action = pointer(args[10]);
    const uint8_t *live = pointer(args[11]);
    const Outcome out = outcome(args + 12);
    if (PyErr_Occurred()) return NULL;
    for (Py_ssize_t i = 0; i < n; i++)
        if (action[i] != 0 && action[i] != 1) return Py_BuildValue("lO", -1L, Py_None);
    Py_buffer buffers[8] = {{0}};
    const Py_ssize_t one = 8 * n, sizes[8] = {4 * one, 4 * n, one, one, 80, 16 * n, one, one};
    if (open_buffers(args, buffers, sizes, 8) < 0) {
        release(buffers, 8);
        return NULL;
    }
    double *x = buffers[0].buf, *speed = x + n, *angle = x + 2 * n, *angular = x + 3 * n;
    int32_t *steps = buffers[1].buf;
    const double *cosines = buffers[2].buf, *sines = buffers[3].buf, *numbers = buffers[4].buf;
    double *returns = buffers[6].buf;
    int64_t *lengths = buffers[7].buf;
    const double mass = numbers[0], pole = numbers[1], leverage = numbers[2], gravity = numbers[3], length = numbers[4],
                 tau = numbers[5], third = numbers[6], force = numbers[7], far = numbers[8], tilted = numbers[9];
    PyObject *episodes = NULL;
    long moved = 0;
    int failed = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        const int moves = live == NULL || live[i];
        if (moves) {
            const double cosine = cosines[i], sine = sines[i], pushed = action[i] ? force : -force;
            double push = (leverage * (angular[i] * angular[i]) * sine + pushed) / mass;
            const double turn = (gravity * sine - cosine * push) / (length * (third - pole * (cosine * cosine) / mass));
            push -= leverage * turn * cosine / mass;
            x[i] += tau * speed[i];
            speed[i] += tau * push;
            angle[i] += tau * angular[i];
            angular[i] += tau * turn;
            steps[i] += 1;
            returns[i] += 1;
            lengths[i] += 1;
            moved++;
        }
        float *seen = out.observation + 4 * i;
        seen[0] = (float)x[i], seen[1] = (float)speed[i], seen[2] = (float)angle[i], seen[3] = (float)angular[i];
        out.reward[i] = (float)moves;
        out.terminated[i] = fabs(x[i]) > far || fabs(angle[i]) > tilted;
        out.truncated[i] = steps[i] >= longest;
        out.done[i] = out.terminated[i] | out.truncated[i];
        if (out.done[i] && !failed) failed = end_episode(&episodes, &returns[i], &lengths[i]);
    }
    memcpy(out.standing_at, out.observation, 16 * (size_t)n);
    memcpy(buffers[5].buf, out.observation, 16 * (size_t)n);
    release(buffers, 8);
    if (failed) {
        Py_XDECREF(episodes);
        return NULL;
    }
    return episodes ? Py_BuildValue("lN", moved, episodes) : Py_BuildValue("lO", moved, Py_None);
}

/* cartpole_begin(state [4, n] f64, steps [n] i32, standing [n, 4] f32, draws [4, ended] f64, n, done bool*, standing_at f32*):
   new episodes in the rows that are done, at the states drawn. */
static PyObject *cartpole_begin(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    if (expect(count, 7) < 0) return NULL;
    const Py_ssize_t n = PyLong_AsSsize_t(args[4]);
    const uint8_t *done = pointer(args[5]);
    float *standing_at = pointer(args[6]);
    if (PyErr_Occurred()) return NULL;
    Py_ssize_t ended = 0;
    for (Py_ssize_t i = 0; i < n; i++) ended += done[i];
    Py_buffer buffers[4] = {{0}};
    const Py_ssize_t sizes[4] = {32 * n, 4 * n, 16 * n, 32 * ended};
    if (open_buffers(args, buffers, sizes, 4) == 0) {
        double *state = buffers[0].buf;
        const double *drawn = buffers[3].buf;
        float *standing = buffers[2].buf;
        for (Py_ssize_t i = 0; i < n; i++) {
            if (!done[i]) continue;
            ((int32_t *)buffers[1].buf)[i] = 0;
            for (int k = 0; k < 4; k++) {
                state[k * n + i] = drawn[k * ended];
                standing_at[4 * i + k] = standing[4 * i + k] = (float)drawn[k * ended];
            }
            drawn++;
        }
    }
    release(buffers, 4);
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

/* MuJoCo ----------------------------------------------------------------------------------------------------------- */

typedef void (*Step)(const void *model, void *data);

/* The memory of a row's simulation. */
typedef struct {
    void *data;
    double *control, *place, *position, *velocity, *forces;
} Row;

/* Rows to advance. */
typedef struct {
    const Row *rows;
    const int32_t *which;
    uint32_t count;
    const void *model;
    Step step, forces;
    int frames;
} Work;

static void simulate(const Work *work, uint32_t at) {
    void *data = work->rows[work->which[at]].data;
    for (int frame = 0; frame < work->frames; frame++) work->step(work->model, data);
    if (work->forces) work->forces(work->model, data);
}

/* The one step that threads share. */
static struct {
    Work work;
    _Atomic uint64_t ticket; /* the step's number, and in the lower half the next row that nobody has */
    _Atomic uint32_t finished, posted;
    int busy;
} job;

static uint64_t ticket(uint32_t number, uint32_t row) { return (uint64_t)number << 32 | row; }

/* Advance rows of a step until all are taken; how many these were. A row is taken only while its step is the current one,
   and a step stays the current one until all rows taken are finished: so what is read of it after that is its own. */
static uint32_t run_shared(uint32_t number) {
    uint32_t mine = 0;
    for (;;) {
        uint64_t next = atomic_load(&job.ticket);
        if (next >> 32 != number || (uint32_t)next >= job.work.count) return mine;
        if (!atomic_compare_exchange_weak(&job.ticket, &next, next + 1)) continue;
        simulate(&job.work, (uint32_t)next);
        atomic_fetch_add(&job.finished, 1);
        mine++;
    }
}

static int helpers_alive = 0;

#ifdef __linux__
static pid_t helpers_of = 0;

static void futex(_Atomic uint32_t *word, int operation, uint32_t value, const struct timespec *timeout) {
    syscall(SYS_futex, word, operation | FUTEX_PRIVATE_FLAG, value, timeout, NULL, 0);
}

static void *help(void *started) {
    atomic_store((_Atomic uint32_t *)started, (uint32_t)syscall(SYS_gettid));
    futex(started, FUTEX_WAKE, 1, NULL);
    uint32_t seen = atomic_load(&job.posted);
    for (;;) {
        futex(&job.posted, FUTEX_WAIT, seen, NULL);
        const uint32_t now = atomic_load(&job.posted);
        if (now == seen) continue;
        seen = now;
        run_shared(now);
        futex(&job.finished, FUTEX_WAKE, 1, NULL);
    }
    return NULL;
}

/* helper() -> the system's number of a new thread, for its CPUs and its priority to be set */
static PyObject *helper(PyObject *self, PyObject *ignored) {
    static _Atomic uint32_t started;
    pthread_t thread;
    pthread_attr_t detached;
    if (helpers_of != getpid()) helpers_alive = 0, helpers_of = getpid(); /* in a forked process there is none */
    atomic_store(&started, 0);
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    const int failed = pthread_create(&thread, &detached, help, &started);
    pthread_attr_destroy(&detached);
    if (failed) return PyErr_Format(PyExc_OSError, "no thread could be started: %s", strerror(failed));
    Py_BEGIN_ALLOW_THREADS
    while (!atomic_load(&started)) futex(&started, FUTEX_WAIT, 0, NULL);
    Py_END_ALLOW_THREADS
    helpers_alive++;
    return PyLong_FromUnsignedLong(atomic_load(&started));
}

static int helpers_here(void) { return helpers_of == getpid() ? helpers_alive : 0; }

static void post(uint32_t number, int helpers) {
    atomic_store(&job.posted, number);
    futex(&job.posted, FUTEX_WAKE, (uint32_t)helpers, NULL);
}

/* Until every row is finished. A helper that was not let run has taken none, and is not waited for. */
static void wait_for_rows(void) {
    const struct timespec soon = {0, 1000000};
    uint32_t finished;
    while ((finished = atomic_load(&job.finished)) < job.work.count) {
        for (int turn = 0; turn < 2000 && atomic_load(&job.finished) == finished; turn++) __asm__ volatile("" ::: "memory");
        if (atomic_load(&job.finished) == finished) futex(&job.finished, FUTEX_WAIT, finished, &soon);
    }
}
#else
static PyObject *helper(PyObject *self, PyObject *ignored) { Py_RETURN_NONE; }
static int helpers_here(void) { return 0; }
static void post(uint32_t number, int helpers) {}
static void wait_for_rows(void) {}
#endif

/* helpers() -> how many threads of this process help */
static PyObject *helpers(PyObject *self, PyObject *ignored) { return PyLong_FromLong(helpers_here()); }

/* Advance all rows, so many helpers at hand; how many of them this thread did. */
static uint32_t run(const Work *work, int wake) {
    static uint32_t number = 0;
    number++;
    atomic_store(&job.ticket, ticket(number, UINT32_MAX)); /* nobody takes one while the work is written down */
    atomic_thread_fence(memory_order_seq_cst);
    job.work = *work;
    atomic_store(&job.finished, 0);
    atomic_store(&job.ticket, ticket(number, 0));
    post(number, wake);
    const uint32_t mine = run_shared(number);
    wait_for_rows();
    return mine;
}

/* MuJoCo asks a clock several times in each part of a frame, for a profile that nobody sees here: a tenth of its time. It
   does not while steps of ours run, in whatever thread. Both are called with Python's lock. */
static int clocks_stopped = 0;
static void *stopped_clock;

static void stop_clock(void **clock) {
    if (clock && clocks_stopped++ == 0) stopped_clock = *clock, *clock = NULL;
}

static void start_clock(void **clock) {
    if (clock && --clocks_stopped == 0) *clock = stopped_clock;
}

/* numpy's sum of the squares of a row that lies in one piece: eight sums side by side, then those. */
#define SUM_OF_SQUARES(name, number)                                                                                  \
    static number name(const number *values, Py_ssize_t n) {                                                          \
        number total = 0, part[8];                                                                                    \
        if (n < 8) {                                                                                                  \
            for (Py_ssize_t i = 0; i < n; i++) total += values[i] * values[i];                                        \
            return total;                                                                                             \
        }                                                                                                             \
        for (int k = 0; k < 8; k++) part[k] = values[k] * values[k];                                                  \
        Py_ssize_t i = 8;                                                                                             \
        for (; i < n - n % 8; i += 8)                                                                                 \
            for (int k = 0; k < 8; k++) part[k] += values[i + k] * values[i + k];                                     \
        total = ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7]));            \
        for (; i < n; i++) total += values[i] * values[i];                                                            \
        return total;                                                                                                 \
    }
SUM_OF_SQUARES(sum_of_float_squares, float)
SUM_OF_SQUARES(sum_of_squares, double)

static double within(double value, double low, double high) {
    value = value < low ? low : value;
    return value > high ? high : value;
}

enum { POSITIONS, VELOCITIES, ACTIONS, FORCES, SKIPPED, CLIPPED, HEALTH, TERMINATES, SIZES };
enum { ALWAYS, HOPPER, WALKER, ANT };
enum { SECONDS, FORWARD, HEALTHY_REWARD, CONTROL_COST, CONTACT_COST, FORCE_LOW, FORCE_HIGH, Z_LOW, Z_HIGH, ANGLE_LOW,
       ANGLE_HIGH, STATE_LOW, STATE_HIGH, NUMBERS };

static int all_between(const double *values, Py_ssize_t n, double low, double high) {
    for (Py_ssize_t i = 0; i < n; i++)
        if (!(low < values[i] && values[i] < high)) return 0;
    return 1;
}

static int all_finite(const double *values, Py_ssize_t n) {
    for (Py_ssize_t i = 0; i < n; i++)
        if (!isfinite(values[i])) return 0;
    return 1;
}

static int healthy(const Row *row, const int64_t *sizes, const double *numbers) {
    const double *position = row->position, *velocity = row->velocity;
    const Py_ssize_t nq = sizes[POSITIONS], nv = sizes[VELOCITIES];
    switch (sizes[HEALTH]) {
    case HOPPER:
        return all_between(position + 1, 1, numbers[Z_LOW], numbers[Z_HIGH])
               && all_between(position + 2, 1, numbers[ANGLE_LOW], numbers[ANGLE_HIGH])
               && all_between(position + 2, nq - 2, numbers[STATE_LOW], numbers[STATE_HIGH])
               && all_between(velocity, nv, numbers[STATE_LOW], numbers[STATE_HIGH]);
    case WALKER:
        return all_between(position + 1, 1, numbers[Z_LOW], numbers[Z_HIGH])
               && all_between(position + 2, 1, numbers[ANGLE_LOW], numbers[ANGLE_HIGH]);
    case ANT:
        return numbers[Z_LOW] <= position[2] && position[2] <= numbers[Z_HIGH] && all_finite(position, nq)
               && all_finite(velocity, nv);
    }
    return 1;
}

/* What is seen of a row after its step, and its reward. */
static double observe(const Row *row, const float *action, double before, const int64_t *sizes, const double *numbers,
                      float *seen, int *well) {
    const Py_ssize_t nq = sizes[POSITIONS], nv = sizes[VELOCITIES], nf = sizes[FORCES];
    double reward = row->place[0] - before;
    reward /= numbers[SECONDS];
    reward *= numbers[FORWARD];
    *well = 1;
    if (sizes[HEALTH] != ALWAYS) {
        *well = healthy(row, sizes, numbers);
        reward += *well * numbers[HEALTHY_REWARD];
    }
    for (Py_ssize_t i = sizes[SKIPPED]; i < nq; i++) *seen++ = (float)row->position[i];
    for (Py_ssize_t i = 0; i < nv; i++)
        *seen++ = (float)(sizes[CLIPPED] ? within(row->velocity[i], -10, 10) : row->velocity[i]);
    const float control = (float)numbers[CONTROL_COST] * sum_of_float_squares(action, sizes[ACTIONS]);
    double cost = control;
    if (nf) {
        double forces[nf];
        for (Py_ssize_t i = 0; i < nf; i++) forces[i] = within(row->forces[i], numbers[FORCE_LOW], numbers[FORCE_HIGH]);
        for (Py_ssize_t i = 6; i < nf; i++) *seen++ = (float)forces[i]; /* without the world's own */
        cost += numbers[CONTACT_COST] * sum_of_squares(forces, nf);
    }
    return reward - cost;
}

/* Count a step of a row, as Gymnasium's time limit does; whether it was the last one, or -1. */
static int count_step(PyObject *limit) {
    static PyObject *elapsed = NULL, *longest = NULL;
    if (elapsed == NULL) elapsed = PyUnicode_InternFromString("_elapsed_steps");
    if (longest == NULL) longest = PyUnicode_InternFromString("_max_episode_steps");
    PyObject *counted = PyObject_GetAttr(limit, elapsed), *most = PyObject_GetAttr(limit, longest), *now = NULL;
    int last = -1;
    if (counted != NULL && most != NULL) {
        const long steps = PyLong_AsLong(counted) + 1, allowed = PyLong_AsLong(most);
        if (!PyErr_Occurred() && (now = PyLong_FromLong(steps)) && PyObject_SetAttr(limit, elapsed, now) == 0)
            last = steps >= allowed;
    }
    Py_XDECREF(counted), Py_XDECREF(most), Py_XDECREF(now);
    return last;
}

/* locomotion(rows [n, 6] addresses, sizes, numbers, low [A] f32, high [A] f32, standing [n, D] f32, returns [n] f64,
              lengths [n] i64, limits: a list, n, D, model, step, forces or 0, clock** or 0, frames, threads to wake,
              action f32*, live bool* or 0, outcome …)
   -> rows moved, or -1: a NaN among the actions, and nothing has moved; the episodes that ended, or None; seconds of a row */
static PyObject *locomotion(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    if (expect(count, 25) < 0) return NULL;
    PyObject *limits = args[8], *answer = NULL;
    const Py_ssize_t n = PyLong_AsSsize_t(args[9]), width = PyLong_AsSsize_t(args[10]);
    const void *model = pointer(args[11]);
    const Step step = (Step)pointer(args[12]), forces = (Step)pointer(args[13]);
    void **clock = pointer(args[14]);
    const int frames = (int)PyLong_AsLong(args[15]), wake = (int)PyLong_AsLong(args[16]);
    const float *action = pointer(args[17]);
    const uint8_t *live = pointer(args[18]);
    const Outcome out = outcome(args + 19);
    if (PyErr_Occurred()) return NULL;
    if (!PyList_Check(limits) || PyList_GET_SIZE(limits) != n)
        return PyErr_Format(PyExc_TypeError, "a list of %zd time limits is needed", n);

    Py_buffer buffers[8] = {{0}};
    const Py_ssize_t fixed[3] = {n * (Py_ssize_t)sizeof(Row), SIZES * 8, NUMBERS * 8};
    if (open_buffers(args, buffers, fixed, 3) < 0) goto end;
    const Row *rows = buffers[0].buf;
    const int64_t *sizes = buffers[1].buf;
    const double *numbers = buffers[2].buf;
    const Py_ssize_t actions = sizes[ACTIONS];
    const Py_ssize_t more[5] = {4 * actions, 4 * actions, 4 * n * width, 8 * n, 8 * n};
    if (open_buffers(args + 3, buffers + 3, more, 5) < 0) goto end;
    const float *low = buffers[3].buf, *high = buffers[4].buf;
    float *standing = buffers[5].buf;
    double *returns = buffers[6].buf;
    int64_t *lengths = buffers[7].buf;

    for (Py_ssize_t i = 0; i < n * actions; i++)
        if (isnan(action[i])) {
            answer = Py_BuildValue("lOd", -1L, Py_None, 0.0);
            goto end;
        }
    int32_t *which = PyMem_Malloc((size_t)(n + 1) * (sizeof(int32_t) + sizeof(double) + (size_t)actions * sizeof(float)));
    if (which == NULL) {
        PyErr_NoMemory();
        goto end;
    }
    double *before = (double *)(which + (n + 1) / 2 * 2);
    float *taken = (float *)(before + n);
    uint32_t moving = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        if (live != NULL && !live[i]) continue;
        float *mine = taken + moving * actions;
        for (Py_ssize_t k = 0; k < actions; k++) {
            const float given = action[i * actions + k] < low[k] ? low[k] : action[i * actions + k];
            rows[i].control[k] = mine[k] = given > high[k] ? high[k] : given;
        }
        before[moving] = rows[i].place[0];
        which[moving++] = (int32_t)i;
    }

    const Work work = {rows, which, moving, model, step, forces, frames};
    const int shared = wake && moving > 1 && !job.busy && helpers_here();
    uint32_t mine = moving;
    struct timespec start, stop;
    clock_gettime(CLOCK_MONOTONIC, &start);
    job.busy |= shared;
    stop_clock(clock);
    Py_BEGIN_ALLOW_THREADS
    if (shared)
        mine = run(&work, wake);
    else
        for (uint32_t at = 0; at < moving; at++) simulate(&work, at);
    Py_END_ALLOW_THREADS
    start_clock(clock);
    job.busy &= !shared;
    clock_gettime(CLOCK_MONOTONIC, &stop);

    memcpy(out.observation, standing, 4 * (size_t)(n * width));
    memset(out.reward, 0, 4 * (size_t)n);
    memset(out.terminated, 0, (size_t)n);
    memset(out.truncated, 0, (size_t)n);
    PyObject *episodes = NULL;
    int failed = 0;
    for (uint32_t at = 0; at < moving && !failed; at++) {
        const int32_t i = which[at];
        int well;
        const double reward = observe(&rows[i], taken + at * actions, before[at], sizes, numbers,
                                      out.observation + i * width, &well);
        out.reward[i] = (float)reward;
        returns[i] += reward;
        lengths[i] += 1;
        const int last = count_step(PyList_GET_ITEM(limits, i));
        failed = last < 0;
        out.terminated[i] = sizes[TERMINATES] && !well;
        out.truncated[i] = last == 1;
        if ((out.terminated[i] | out.truncated[i]) && !failed) failed = end_episode(&episodes, &returns[i], &lengths[i]);
    }
    for (Py_ssize_t i = 0; i < n; i++) out.done[i] = out.terminated[i] | out.truncated[i];
    memcpy(standing, out.observation, 4 * (size_t)(n * width));
    memcpy(out.standing_at, standing, 4 * (size_t)(n * width));
    PyMem_Free(which);
    if (!failed) {
        const double seconds = (double)(stop.tv_sec - start.tv_sec) + 1e-9 * (double)(stop.tv_nsec - start.tv_nsec);
        answer = Py_BuildValue("lOd", (long)moving, episodes ? episodes : Py_None, mine ? seconds / mine : 0.0);
    }
    Py_XDECREF(episodes);
end:
    release(buffers, 8);
    return answer;
}

/* Networks --------------------------------------------------------------------------------------------------------- */

/* Sums are taken in eight parts, whatever the CPU has room for, so that every CPU has the same bits. */
typedef float Eight __attribute__((vector_size(32)));

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_CPU __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_CPU
#endif
#define TOGETHER 4

static inline __attribute__((always_inline)) float sum(const Eight *parts) {
    const Eight p = *parts;
    typedef float Four __attribute__((vector_size(16)));
    const Four q = __builtin_shufflevector(p, p, 0, 1, 2, 3) + __builtin_shufflevector(p, p, 4, 5, 6, 7);
    const Four r = q + __builtin_shufflevector(q, q, 2, 3, 2, 3);
    return r[0] + r[1];
}

/* Some outputs of a linear layer, for a row or for two: what is read of a weight serves both. */
static inline __attribute__((always_inline)) void linear_outputs(const float *x, const float *weight, const float *bias,
                                                                 Py_ssize_t inputs, Py_ssize_t outputs, float *y,
                                                                 const int some, const int two) {
    Eight first[TOGETHER] = {{0}}, second[TOGETHER] = {{0}};
    Py_ssize_t k = 0;
    for (; k + 8 <= inputs; k += 8) {
        Eight given, other, factor;
        memcpy(&given, x + k, sizeof given);
        if (two) memcpy(&other, x + inputs + k, sizeof other);
        for (int j = 0; j < some; j++) {
            memcpy(&factor, weight + j * inputs + k, sizeof factor);
            first[j] += given * factor;
            if (two) second[j] += other * factor;
        }
    }
    for (int j = 0; j < some; j++) {
        const float *rest = weight + j * inputs;
        float total = sum(&first[j]), beside = two ? sum(&second[j]) : 0;
        for (Py_ssize_t i = k; i < inputs; i++) {
            total += x[i] * rest[i];
            if (two) beside += x[inputs + i] * rest[i];
        }
        y[j] = bias ? total + bias[j] : total;
        if (two) y[outputs + j] = bias ? beside + bias[j] : beside;
    }
}

/* The same for all rows. */
static inline __attribute__((always_inline)) void all_rows(const float *x, Py_ssize_t rows, const float *weight,
                                                           const float *bias, Py_ssize_t inputs, Py_ssize_t outputs,
                                                           float *y, const int some) {
    for (; rows > 1; rows -= 2, x += 2 * inputs, y += 2 * outputs)
        linear_outputs(x, weight, bias, inputs, outputs, y, some, 1);
    if (rows) linear_outputs(x, weight, bias, inputs, outputs, y, some, 0);
}

FOR_EACH_CPU static void linear(const float *x, Py_ssize_t rows, const float *weight, const float *bias,
                                Py_ssize_t inputs, Py_ssize_t outputs, float *y) {
    Py_ssize_t j = 0;
    for (; j + TOGETHER <= outputs; j += TOGETHER)
        all_rows(x, rows, weight + j * inputs, bias ? bias + j : NULL, inputs, outputs, y + j, TOGETHER);
    for (; j < outputs; j++)
        all_rows(x, rows, weight + j * inputs, bias ? bias + j : NULL, inputs, outputs, y + j, 1);
}

/* x · p(x²) / q(x²), fitted to tanh(x) up to where it is 1: within 4e-7 of it. */
FOR_EACH_CPU static void hyperbolic_tangent(float *values, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count; i++) {
        float x = values[i];
        x = x > 9.02f ? 9.02f : x;
        x = x < -9.02f ? -9.02f : x;
        const float t = x * x;
        float p = 1.33192898e-08f * t + 2.05836770e-05f, q = 7.76211981e-07f * t + 3.28311394e-04f;
        p = ((p * t + 3.49404825e-03f) * t + 1.33797301e-01f) * t + 9.99999979e-01f;
        q = ((q * t + 2.58711272e-02f) * t + 4.67130454e-01f) * t + 1.0f;
        x = x * p / q;
        x = x > 1.0f ? 1.0f : x;
        values[i] = x < -1.0f ? -1.0f : x;
    }
}

static void rectify(float *values, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count; i++) values[i] = values[i] < 0 ? 0 : values[i];
}

enum { NOTHING, TANH, RELU };

/* network(x [rows, inputs] f32*, rows, live bool* or 0, most, y f32*, and for each layer: weight [outputs, inputs] f32*, bias f32*
           or 0, inputs, outputs, what follows it: 0 nothing, 1 tanh, 2 relu)
   -> whether it was computed: not if there are more than `most` live rows. The output for rows that are not live is 0. */
static PyObject *network(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    const Py_ssize_t layers = (count - 5) / 5;
    if (expect(count, 5 + 5 * (layers > 0 ? layers : 1)) < 0) return NULL;
    PyObject *const *of_layers = args + 5;
    const float *given = pointer(args[0]);
    const Py_ssize_t rows = PyLong_AsSsize_t(args[1]), most = PyLong_AsSsize_t(args[3]);
    const uint8_t *live = pointer(args[2]);
    float *answer = pointer(args[4]);
    Py_ssize_t widest = PyLong_AsSsize_t(of_layers[2]), moving = 0;
    const Py_ssize_t inputs = widest, outputs = PyLong_AsSsize_t(of_layers[5 * (layers - 1) + 3]);
    for (Py_ssize_t layer = 0; layer < layers; layer++) {
        const Py_ssize_t width = PyLong_AsSsize_t(of_layers[5 * layer + 3]);
        widest = width > widest ? width : widest;
    }
    if (PyErr_Occurred()) return NULL;
    for (Py_ssize_t i = 0; i < rows; i++) moving += live == NULL || live[i];
    if (moving > most) Py_RETURN_FALSE;
    float *between = PyMem_Malloc(2 * sizeof(float) * (size_t)(moving * widest + 1));
    if (between == NULL) return PyErr_NoMemory();
    const float *x = given;
    if (moving < rows) {
        float *gathered = between + moving * widest;
        for (Py_ssize_t i = 0; i < rows; i++)
            if (live[i]) {
                memcpy(gathered, given + i * inputs, sizeof(float) * (size_t)inputs);
                gathered += inputs;
            }
        x = between + moving * widest;
    }
    for (Py_ssize_t layer = 0; layer < layers; layer++) {
        PyObject *const *own = of_layers + 5 * layer;
        const Py_ssize_t from = PyLong_AsSsize_t(own[2]), to = PyLong_AsSsize_t(own[3]);
        const long follows = PyLong_AsLong(own[4]);
        float *y = moving == rows && layer == layers - 1 ? answer : between + layer % 2 * moving * widest;
        linear(x, moving, pointer(own[0]), pointer(own[1]), from, to, y);
        if (follows == TANH) hyperbolic_tangent(y, moving * to);
        if (follows == RELU) rectify(y, moving * to);
        x = y;
    }
    if (moving < rows)
        for (Py_ssize_t i = 0; i < rows; i++) {
            const size_t row = sizeof(float) * (size_t)outputs;
            if (live[i]) memcpy(answer + i * outputs, x, row), x += outputs;
            else memset(answer + i * outputs, 0, row);
        }
    PyMem_Free(between);
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_TRUE;
}

/* Choices of actions ----------------------------------------------------------------------------------------------- */

/* epsilon_greedy(values [n, k] f32*, chance [n] f32*, index [n] i64*, n, k, epsilon): write the index of the highest value
   over those of rows whose chance is not below epsilon. As torch has it, a NaN is higher than anything. */
static PyObject *epsilon_greedy(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    if (expect(count, 6) < 0) return NULL;
    const float *values = pointer(args[0]), *chance = pointer(args[1]);
    int64_t *index = pointer(args[2]);
    const Py_ssize_t n = PyLong_AsSsize_t(args[3]), k = PyLong_AsSsize_t(args[4]);
    const float epsilon = (float)PyFloat_AsDouble(args[5]);
    if (PyErr_Occurred()) return NULL;
    for (Py_ssize_t i = 0; i < n; i++, values += k) {
        if (chance[i] < epsilon) continue;
        Py_ssize_t best = 0;
        for (Py_ssize_t j = 1; j < k && !isnan(values[best]); j++)
            if (values[j] > values[best] || isnan(values[j])) best = j;
        index[i] = best;
    }
    Py_RETURN_NONE;
}

/* Rows of replay --------------------------------------------------------------------------------------------------- */

/* write_rows(arrays: a list, addresses: a list, at, count, rows): copy so many rows from each address to its array, from
   row `at` on; every array has `rows` rows. */
static PyObject *write_rows(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    if (expect(count, 5) < 0) return NULL;
    PyObject *arrays = args[0], *addresses = args[1];
    const Py_ssize_t at = PyLong_AsSsize_t(args[2]), number = PyLong_AsSsize_t(args[3]), rows = PyLong_AsSsize_t(args[4]);
    if (PyErr_Occurred()) return NULL;
    if (!PyList_Check(arrays) || !PyList_Check(addresses) || PyList_GET_SIZE(arrays) != PyList_GET_SIZE(addresses))
        return PyErr_Format(PyExc_TypeError, "two lists of the same length are needed");
    if (at < 0 || number < 0 || at + number > rows)
        return PyErr_Format(PyExc_IndexError, "rows %zd to %zd of %zd", at, at + number, rows);
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(arrays); i++) {
        Py_buffer buffer;
        const char *from = pointer(PyList_GET_ITEM(addresses, i));
        if (PyErr_Occurred() || PyObject_GetBuffer(PyList_GET_ITEM(arrays, i), &buffer, PyBUF_WRITABLE) < 0) return NULL;
        const size_t size = rows ? (size_t)(buffer.len / rows) : 0;
        memcpy((char *)buffer.buf + (size_t)at * size, from, (size_t)number * size);
        PyBuffer_Release(&buffer);
    }
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"cartpole", (PyCFunction)(void (*)(void))cartpole, METH_FASTCALL, "One step of CartPole's rows."},
    {"cartpole_begin", (PyCFunction)(void (*)(void))cartpole_begin, METH_FASTCALL, "New episodes of CartPole's rows."},
    {"locomotion", (PyCFunction)(void (*)(void))locomotion, METH_FASTCALL, "One step of MuJoCo's rows."},
    {"epsilon_greedy", (PyCFunction)(void (*)(void))epsilon_greedy, METH_FASTCALL, "Choose actions by their values."},
    {"network", (PyCFunction)(void (*)(void))network, METH_FASTCALL, "The output of a small network for a few rows."},
    {"write_rows", (PyCFunction)(void (*)(void))write_rows, METH_FASTCALL, "Copy rows to a table."},
    {"helper", helper, METH_NOARGS, "Start a thread that helps to step MuJoCo's rows."},
    {"helpers", helpers, METH_NOARGS, "How many threads of this process help."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", "Steps of environments' rows.", -1, methods,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) { return PyModule_Create(&module); }
