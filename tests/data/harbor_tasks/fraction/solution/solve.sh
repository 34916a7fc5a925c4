#!/bin/sh
mkdir out
echo one > out/1
[ "$BOTH" = no ] || echo two > out/2
