#!/bin/sh
# Reward: the fraction of correct files; words has to be the image's own.
correct=0
[ "$(cat out/1)" = one ] && correct=$((correct + 1))
[ "$(cat out/2)" = two ] && correct=$((correct + 1))
[ "$(cat words)" = "one two" ] || correct=0
reward=0.5
[ $correct = 0 ] && reward=0.0
[ $correct = "$WANTED" ] && reward=1.0
echo "{\"correct\": $correct, \"reward\": $reward}" > /logs/verifier/reward.json
