# Creates the demo's certificate authority once, and new certificates at each start. Running processes reload them.
# Here, a region's front and learners share a volume. In production, give each process only its own certificate, and
# keep the authority's key away from all processes.
cd /certs/authority
[ -e ca-key.pem ] || atoll certs init --dir .

issue() { # directory, role, name, and --host options
  to=/certs/$1 role=$2 name=$3
  shift 3
  atoll certs issue --dir . "$role" "$name" "$@"
  mkdir -p "$to"
  cp "$role-$(echo "$name" | sed 's/\*/+/')"/*.pem "$to"
}

issue home core home --host core --host localhost --host 127.0.0.1 --host relay-eu --host relay-us --host relay-ap \
  --host shard-0 --host shard-1 --host shard-2
issue operator operator demo
if ! [ -s /certs/operator/token ]; then
  (umask 077 && atoll token demo --file /certs/operator/tokens > /certs/operator/token.part)
  mv /certs/operator/token.part /certs/operator/token
fi
issue dashboard operator dashboard
for region in eu us ap near; do
  issue "$region/front" front "$region" --host "front-$region"
  issue "$region/learner" learner "$region.*"
done

# The list of revoked certificates. Cores and fronts read their copies again after each change.
touch revoked
for to in home eu/front us/front ap/front near/front; do
  cp revoked "/certs/$to"
done
