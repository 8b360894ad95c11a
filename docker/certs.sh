# An authority for the demo, once, and certificates for everybody, anew each time: processes take them as they run.
# On one machine a region's front and learners share a volume; elsewhere each has what is its own, and nobody the authority.
cd /certs/authority
[ -e ca-key.pem ] || atoll certs init --dir .

give() { # to whom it goes, role, name, and the host names it is called by
  to=/certs/$1 role=$2 name=$3
  shift 3
  atoll certs issue --dir . "$role" "$name" "$@"
  mkdir -p "$to"
  cp "$role-$(echo "$name" | sed 's/\*/+/')"/*.pem "$to"
}

give home core home --host core --host localhost --host 127.0.0.1 --host relay-eu --host relay-us --host relay-ap
give operator operator demo
if ! [ -s /certs/operator/token ]; then
  (umask 077 && atoll token demo --file /certs/operator/tokens > /certs/operator/token.part)
  mv /certs/operator/token.part /certs/operator/token
fi
give dashboard operator dashboard
for region in eu us ap; do
  give "$region/front" front "$region" --host "front-$region"
  give "$region/learner" learner "$region.*"
done
