// CHECK for tests: says where and ends the process.
#pragma once

#include <cstdio>
#include <cstdlib>

#define CHECK(condition)                                                         \
    do {                                                                         \
        if (!(condition)) {                                                      \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            std::exit(1);                                                        \
        }                                                                        \
    } while (0)

#define CHECK_THROWS(type, expression)                                                          \
    do {                                                                                        \
        bool has_thrown = false;                                                                \
        try {                                                                                   \
            (void)(expression);                                                                 \
        } catch (const type&) {                                                                 \
            has_thrown = true;                                                                  \
        }                                                                                       \
        if (!has_thrown) {                                                                      \
            std::fprintf(stderr, "%s:%d: no %s: %s\n", __FILE__, __LINE__, #type, #expression); \
            std::exit(1);                                                                       \
        }                                                                                       \
    } while (0)
