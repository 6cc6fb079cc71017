/* How far two processors lie apart: nanoseconds of a round trip of one cache line between them.

   A virtual machine's processors are moved by its host, and may lie behind one cache in one minute
   and behind two in the next; what threads hand each other takes several times as long then.
   Compiled and called by encoder_paired.py --distance. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <time.h>

enum { TRIPS = 50, REPEATS = 20 };
static _Atomic int turn, done;

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

static void stay_on(int processor)
{
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(processor, &one);
    sched_setaffinity(0, sizeof one, &one);
}

static void *answer(void *processor)
{
    stay_on(*(int *)processor);
    while (!done)
        if (turn)
            turn = 0;
    return 0;
}

double round_trip(int first, int second)
{
    cpu_set_t before;
    pthread_t other;
    double least = 1e9;
    sched_getaffinity(0, sizeof before, &before);
    stay_on(first);
    turn = done = 0;
    if (pthread_create(&other, 0, answer, &second))
        return -1;
    for (int i = 0; i < REPEATS; i++) {
        double start = seconds();
        for (int k = 0; k < TRIPS; k++) {
            turn = 1;
            while (turn)
                ;
        }
        double each = (seconds() - start) / TRIPS;
        if (each < least)
            least = each;
    }
    done = 1;
    pthread_join(other, 0);
    sched_setaffinity(0, sizeof before, &before);
    return 1e9 * least;
}
