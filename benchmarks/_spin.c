/* Floor of collectives.py: two spinning processes on two cores exchange a word in shared memory. For each batch of 1000
 * round trips it prints the mean nanoseconds of a round trip. _floors.py runs it: spin BATCHES */
#define _GNU_SOURCE
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { TRIPS = 1000, WARM = 5 };
struct words {
    _Alignas(128) atomic_long ping;
    _Alignas(128) atomic_long pong;
};

/* Pin this process to the n-th processor that it may use. With one processor, exit: nothing can be measured. */
static void pin(int n) {
    cpu_set_t mine, one;
    sched_getaffinity(0, sizeof mine, &mine);
    if (CPU_COUNT(&mine) < 2) exit(3);
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
        if (CPU_ISSET(cpu, &mine) && n-- == 0) {
            CPU_ZERO(&one);
            CPU_SET(cpu, &one);
            sched_setaffinity(0, sizeof one, &one);
        }
}

static void until(atomic_long *word, long value) {
    while (atomic_load_explicit(word, memory_order_acquire) != value) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }
}

int main(int argc, char **argv) {
    long stretches = (argc > 1 ? atol(argv[1]) : 20) + WARM;
    struct words *words = mmap(NULL, sizeof *words, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (words == MAP_FAILED) return 2;
    cpu_set_t mine;
    sched_getaffinity(0, sizeof mine, &mine);
    if (CPU_COUNT(&mine) < 2) return 3;
    pid_t child = fork();
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL); /* without this the child would spin on after its parent is killed */
        pin(1);
        for (long i = 1; i <= stretches * TRIPS; i++) {
            until(&words->ping, i);
            atomic_store_explicit(&words->pong, i, memory_order_release);
        }
        _exit(0);
    }
    pin(0);
    for (long stretch = 0, i = 1; stretch < stretches; stretch++) {
        struct timespec a, b;
        clock_gettime(CLOCK_MONOTONIC, &a);
        for (long end = i + TRIPS; i < end; i++) {
            atomic_store_explicit(&words->ping, i, memory_order_release);
            until(&words->pong, i);
        }
        clock_gettime(CLOCK_MONOTONIC, &b);
        if (stretch >= WARM) printf("%ld\n", ((b.tv_sec - a.tv_sec) * 1000000000L + b.tv_nsec - a.tv_nsec) / TRIPS);
    }
    return waitpid(child, NULL, 0) == child ? 0 : 1;
}
