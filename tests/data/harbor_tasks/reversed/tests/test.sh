#!/bin/bash
# Reward 1 if the word is reversed and the scratch file is gone.
reward=0
if [ ! -e scratch.txt ] && [ "$(cat answer.txt)" = "$(cat /tests/expected.txt)" ]; then
    reward=1
fi
echo $reward > /logs/verifier/reward.txt
exit $((1 - reward))
