/* Counts the system calls by which a process changes what is below a folder, and ends or fails the n-th of them.

   Preloaded (LD_PRELOAD), it stands before the C library's functions. From crash_points_arm() on, calls on what is
   below FOLDER are counted from 1, and written down. Call number `at` is not made: the process is killed before it
   (errno_or_kill 0), or it fails with that errno, and with `for_good` so do all after it. A write() that is killed has
   written half of its bytes. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char folder[PATH_MAX], calls[1 << 20];
static size_t calls_length;
static long count, at;
static int failure, stays;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void crash_points_arm(const char *path, long number, int errno_or_kill, int for_good) {
    snprintf(folder, sizeof folder, "%s", path);
    count = 0;
    calls_length = 0;
    calls[0] = 0;
    at = number;
    failure = errno_or_kill;
    stays = for_good;
}

/* One line for each call that was made: its name, and the path below the folder. */
const char *crash_points_calls(void) { return calls; }

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static void path_of(int descriptor, char *path) {
    char place[64];
    snprintf(place, sizeof place, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(place, path, PATH_MAX - 1);
    path[length < 0 ? 0 : length] = 0;
}

/* Whether the call is to be stopped; `base` and `name` are those of openat(), or a descriptor alone. */
static int is_hit(const char *call, int base, const char *name) {
    char path[2 * PATH_MAX] = "";
    if (!folder[0]) return 0;
    if (!name || name[0] != '/') {
        if (base == AT_FDCWD) {
            if (!getcwd(path, PATH_MAX)) return 0;
        } else {
            path_of(base, path);
        }
    }
    if (name) snprintf(path + strlen(path), PATH_MAX, "%s%s", name[0] == '/' ? "" : "/", name);
    if (strncmp(path, folder, strlen(folder)) != 0) return 0;
    pthread_mutex_lock(&lock);
    long number = ++count;
    int hit = number == at || (stays && at && number > at);
    if (!hit && calls_length < sizeof calls - 2 * PATH_MAX)
        calls_length += (size_t)sprintf(calls + calls_length, "%s %s\n", call, path + strlen(folder));
    pthread_mutex_unlock(&lock);
    return hit;
}

static void stop(void) {
    if (!failure) {
        kill(getpid(), SIGKILL);
        pause();
    }
    errno = failure;
}

#define GUARD(name, base, path, call)                                                                                  \
    if (is_hit(#name, base, path)) {                                                                                   \
        stop();                                                                                                        \
        return -1;                                                                                                     \
    }                                                                                                                  \
    return REAL(name) call

ssize_t write(int descriptor, const void *bytes, size_t size) {
    if (is_hit("write", descriptor, NULL)) {
        if (!failure && size > 1 && REAL(write)(descriptor, bytes, size / 2) < 0) pause();
        stop();
        return -1;
    }
    return REAL(write)(descriptor, bytes, size);
}

ssize_t pwrite(int descriptor, const void *bytes, size_t size, off_t offset) {
    GUARD(pwrite, descriptor, NULL, (descriptor, bytes, size, offset));
}
ssize_t pwrite64(int descriptor, const void *bytes, size_t size, off64_t offset) {
    GUARD(pwrite64, descriptor, NULL, (descriptor, bytes, size, offset));
}
ssize_t writev(int descriptor, const struct iovec *parts, int number) {
    GUARD(writev, descriptor, NULL, (descriptor, parts, number));
}
int fsync(int descriptor) { GUARD(fsync, descriptor, NULL, (descriptor)); }
int fdatasync(int descriptor) { GUARD(fdatasync, descriptor, NULL, (descriptor)); }
int ftruncate(int descriptor, off_t size) { GUARD(ftruncate, descriptor, NULL, (descriptor, size)); }
int ftruncate64(int descriptor, off64_t size) { GUARD(ftruncate64, descriptor, NULL, (descriptor, size)); }
int truncate(const char *path, off_t size) { GUARD(truncate, AT_FDCWD, path, (path, size)); }
int rename(const char *from, const char *to) { GUARD(rename, AT_FDCWD, to, (from, to)); }
int renameat(int base, const char *from, int other, const char *to) {
    GUARD(renameat, other, to, (base, from, other, to));
}
int link(const char *from, const char *to) { GUARD(link, AT_FDCWD, to, (from, to)); }
int symlink(const char *from, const char *to) { GUARD(symlink, AT_FDCWD, to, (from, to)); }
int unlink(const char *path) { GUARD(unlink, AT_FDCWD, path, (path)); }
int unlinkat(int base, const char *path, int flags) { GUARD(unlinkat, base, path, (base, path, flags)); }
int rmdir(const char *path) { GUARD(rmdir, AT_FDCWD, path, (path)); }
int mkdir(const char *path, mode_t mode) { GUARD(mkdir, AT_FDCWD, path, (path, mode)); }
int mkdirat(int base, const char *path, mode_t mode) { GUARD(mkdirat, base, path, (base, path, mode)); }

#define OPEN(name, base, call)                                                                                         \
    mode_t mode = 0;                                                                                                   \
    if (flags & (O_CREAT | O_TMPFILE)) {                                                                               \
        va_list more;                                                                                                  \
        va_start(more, flags);                                                                                         \
        mode = va_arg(more, mode_t);                                                                                   \
        va_end(more);                                                                                                  \
    }                                                                                                                  \
    if ((flags & (O_CREAT | O_TRUNC | O_WRONLY | O_RDWR)) && is_hit("open", base, path)) {                             \
        stop();                                                                                                        \
        return -1;                                                                                                     \
    }                                                                                                                  \
    return REAL(name) call

int open(const char *path, int flags, ...) { OPEN(open, AT_FDCWD, (path, flags, mode)); }
int open64(const char *path, int flags, ...) { OPEN(open64, AT_FDCWD, (path, flags, mode)); }
int openat(int base, const char *path, int flags, ...) { OPEN(openat, base, (base, path, flags, mode)); }
int openat64(int base, const char *path, int flags, ...) { OPEN(openat64, base, (base, path, flags, mode)); }
