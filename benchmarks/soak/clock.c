/* A wall clock that jumps: CLOCK_REALTIME, as the processes that load this read it through libc, is moved by the seconds in the eight bytes of
the file that MRL_SOAK_CLOCK names. Deadlines that are points of it are moved back before the kernel has them, which keeps its own clock. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

enum { SINCE_1970 = 1000000000 }; /* a point of the monotonic clock is smaller: 31 years */
static const volatile int64_t *seconds;
static long (*next_syscall)(long, ...);
static int (*next_wait)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
static int (*next_sem)(sem_t *, const struct timespec *);

__attribute__((constructor)) static void begin(void) {
  const char *path = getenv("MRL_SOAK_CLOCK");
  int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  next_syscall = dlsym(RTLD_NEXT, "syscall");
  next_wait = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
  next_sem = dlsym(RTLD_NEXT, "sem_timedwait");
  if (file < 0) return;
  void *page = mmap(NULL, sizeof *seconds, PROT_READ, MAP_SHARED, file, 0);
  close(file);
  if (page != MAP_FAILED) seconds = page;
}

static int64_t moved(void) { return seconds ? *seconds : 0; }

static struct timespec back(const struct timespec *point) {
  struct timespec real = *point;
  if (real.tv_sec > SINCE_1970) real.tv_sec -= moved();
  return real;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  static int (*next)(clockid_t, struct timespec *);
  if (!next) next = dlsym(RTLD_NEXT, "clock_gettime");
  int failed = next(clock, now);
  if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += moved();
  return failed;
}

int gettimeofday(struct timeval *now, void *zone) {
  struct timespec read;
  (void)zone;
  clock_gettime(CLOCK_REALTIME, &read);
  now->tv_sec = read.tv_sec, now->tv_usec = read.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *now) {
  struct timespec read;
  clock_gettime(CLOCK_REALTIME, &read);
  if (now) *now = read.tv_sec;
  return read.tv_sec;
}

int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *point) {
  struct timespec real = back(point);
  return next_wait(condition, mutex, &real);
}

int sem_timedwait(sem_t *semaphore, const struct timespec *point) {
  struct timespec real = back(point);
  return next_sem(semaphore, &real);
}

long syscall(long number, ...) {
  long a[6];
  struct timespec real;
  va_list rest;
  va_start(rest, number);
  for (int n = 0; n < 6; n++) a[n] = va_arg(rest, long);
  va_end(rest);
  if (number == SYS_futex && (a[1] & FUTEX_CLOCK_REALTIME) && a[3]) {
    real = back((const struct timespec *)a[3]);
    a[3] = (long)&real;
  }
  return next_syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
